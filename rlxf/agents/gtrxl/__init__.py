"""GTrXL: Gated Transformer-XL, trained online with PPO."""

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.agents.gtrxl.policies import CnnGTrXLPolicy, MlpGTrXLPolicy, MultiInputGTrXLPolicy
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.ppo import GTrXLPPO

__all__ = [
    "CnnGTrXLPolicy",
    "GTrXLPPO",
    "GTrXLPolicy",
    "MlpGTrXLPolicy",
    "MultiInputGTrXLPolicy",
    "gtrxl",
]
