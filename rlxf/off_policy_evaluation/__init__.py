"""Off-policy evaluation: estimates of the return of an agent from logged episodes, without an environment."""

from rlxf.off_policy_evaluation.estimate import estimate_return
from rlxf.off_policy_evaluation.fitted_q import FittedQConfig, fit_q
from rlxf.off_policy_evaluation.policy_replay import Replay, replay
from rlxf.off_policy_evaluation.result import OffPolicyEstimate

__all__ = ["FittedQConfig", "OffPolicyEstimate", "Replay", "estimate_return", "fit_q", "replay"]
