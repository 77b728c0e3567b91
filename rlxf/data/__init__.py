"""Minari datasets: trajectories as flat arrays, windows of steps, and reference scores."""

from rlxf.data.catalog import DatasetSummary, local_folder, summarize
from rlxf.data.dataset_report import DatasetReport, inspect_dataset
from rlxf.data.dataset_source import local_ids
from rlxf.data.encoders import action_encoder, observation_encoder
from rlxf.data.loading import as_trajectories, load_trajectories
from rlxf.data.reference_scores import ReferenceScores, reference_scores, scores_from_table
from rlxf.data.sampling import SAMPLINGS, HighReturns, ReturnWeighted, Sampling, UniformEpisodes, UniformSteps
from rlxf.data.space_comparison import check_spaces_match
from rlxf.data.trajectories import Trajectories, return_to_go
from rlxf.data.windows import EpisodeWindows, WindowBatch, Windows
from rlxf.utils.errors import DatasetError

__all__ = [
    "load_trajectories",
    "as_trajectories",
    "Trajectories",
    "Windows",
    "EpisodeWindows",
    "WindowBatch",
    "Sampling",
    "SAMPLINGS",
    "UniformSteps",
    "UniformEpisodes",
    "HighReturns",
    "ReturnWeighted",
    "DatasetError",
    "ReferenceScores",
    "reference_scores",
    "scores_from_table",
    "check_spaces_match",
    "observation_encoder",
    "action_encoder",
    "return_to_go",
    "inspect_dataset",
    "DatasetReport",
    "DatasetSummary",
    "local_folder",
    "local_ids",
    "summarize",
]
