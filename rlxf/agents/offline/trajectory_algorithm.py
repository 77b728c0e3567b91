"""Base class of algorithms whose model is a transformer over trajectories."""

from rlxf.agents.offline.algorithm import OfflineAlgorithm
from rlxf.agents.offline.trajectory_model import TrajectoryModel
from rlxf.attention import TransformerSpec


class TrajectoryAlgorithm(OfflineAlgorithm):
    """`OfflineAlgorithm` whose model is a transformer over trajectories."""

    policy: TrajectoryModel
    core: TransformerSpec
    return_scale: float | None
    episode_length: int | None

    def _check_weights_fit(self, source: "TrajectoryAlgorithm") -> None:
        """Raise ValueError unless both agents have equal spaces and the same ``episode_length``."""
        for kind, mismatch in source.dataset_info.space_mismatches(self.dataset_info):
            raise ValueError(
                f"the weights do not fit, their {kind}s differ from those of the agent: {mismatch}"
            )
        if source.episode_length != self.episode_length:
            raise ValueError(
                f"the weights do not fit: they have {source.episode_length} time-step embeddings, the agent "
                f"{self.episode_length}; build it with episode_length={source.episode_length}"
            )
