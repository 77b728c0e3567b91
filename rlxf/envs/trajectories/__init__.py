"""Minari datasets: trajectories as flat arrays, windows of steps, and reference scores."""

from rlxf.envs.trajectories.encoders import action_encoder, observation_encoder
from rlxf.envs.trajectories.errors import DatasetError
from rlxf.envs.trajectories.loading import as_trajectories, load_trajectories
from rlxf.envs.trajectories.local import DatasetSummary, local_folder, local_ids, summarize
from rlxf.envs.trajectories.matching import check_fits
from rlxf.envs.trajectories.reference_scores import ReferenceScores, reference_scores, tabled_scores
from rlxf.envs.trajectories.returns import return_to_go
from rlxf.envs.trajectories.trajectories import Trajectories
from rlxf.envs.trajectories.windows import WindowBatch, Windows

__all__ = [
    "load_trajectories",
    "as_trajectories",
    "Trajectories",
    "Windows",
    "WindowBatch",
    "DatasetError",
    "ReferenceScores",
    "reference_scores",
    "tabled_scores",
    "check_fits",
    "observation_encoder",
    "action_encoder",
    "return_to_go",
    "DatasetSummary",
    "local_folder",
    "local_ids",
    "summarize",
]
