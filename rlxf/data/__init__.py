"""Minari datasets: trajectories as flat arrays, windows of steps, and reference scores."""

from rlxf.data.catalog import DatasetSummary, local_folder, local_ids, summarize
from rlxf.data.conversion import return_to_go
from rlxf.data.encoders import action_encoder, observation_encoder
from rlxf.data.errors import DatasetError
from rlxf.data.loading import as_trajectories, load_trajectories
from rlxf.data.reference_scores import ReferenceScores, reference_scores, scores_from_table
from rlxf.data.space_compat import check_spaces_match
from rlxf.data.trajectories import Trajectories
from rlxf.data.windows import WindowBatch, Windows

__all__ = [
    "load_trajectories",
    "as_trajectories",
    "Trajectories",
    "Windows",
    "WindowBatch",
    "DatasetError",
    "ReferenceScores",
    "reference_scores",
    "scores_from_table",
    "check_spaces_match",
    "observation_encoder",
    "action_encoder",
    "return_to_go",
    "DatasetSummary",
    "local_folder",
    "local_ids",
    "summarize",
]
