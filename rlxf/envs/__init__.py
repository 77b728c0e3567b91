"""Gymnasium environments of rlxf, functions that create environments, and wrappers."""

if __name__ != "rlxf.envs":
    raise ImportError(
        f"imported as {__name__!r}: the top-level link is for readers; write 'import rlxf.envs'"
    )

from typing import TYPE_CHECKING

from rlxf.envs.specs import register_envs
from rlxf.utils.lazy_names import lazy_attributes, modules_by_name

if TYPE_CHECKING:  # so that editors and type checkers know the lazy names
    from rlxf.data import Trajectories, Windows, load_trajectories
    from rlxf.envs.action_replay import ActionReplay
    from rlxf.envs.curriculum import Curriculum, CurriculumCallback, CurriculumEnv
    from rlxf.envs.make import make_env, make_vec_env
    from rlxf.envs.masked_velocities import MaskedVelocities
    from rlxf.envs.return_to_go import ReturnToGo
    from rlxf.envs.spaces import check_spaces
    from rlxf.envs.stitching_data import RoadFollower, road_episodes
    from rlxf.envs.stitching_maze import StitchingMaze
    from rlxf.envs.tensor_vec_env import TensorVecEnv, as_vec_env
    from rlxf.envs.tmaze import TMaze
    from rlxf.envs.tmaze_tensor import TMazeTensor
    from rlxf.envs.tmaze_vector import TMazeVector
    from rlxf.envs.vector import GymnasiumVecEnv, StatefulVectorEnv
    from rlxf.envs.worker_pool import Workers
    from rlxf.envs.worker_vec_env import WorkerVecEnv
    from rlxf.envs.wrappers import PreviousReward, PreviousStep, PreviousTransition
    from rlxf.utils.errors import BrokenEnvironmentError, FaultyEnvironmentError

register_envs()

__all__ = [
    "make_vec_env",
    "make_env",
    "Curriculum",
    "CurriculumCallback",
    "CurriculumEnv",
    "check_spaces",
    "RoadFollower",
    "road_episodes",
    "StitchingMaze",
    "TMaze",
    "TMazeVector",
    "PreviousReward",
    "PreviousStep",
    "PreviousTransition",
    "ReturnToGo",
    "ActionReplay",
    "MaskedVelocities",
    "as_vec_env",
    "TensorVecEnv",
    "TMazeTensor",
    "StatefulVectorEnv",
    "GymnasiumVecEnv",
    "Workers",
    "WorkerVecEnv",
    "FaultyEnvironmentError",
    "BrokenEnvironmentError",
    "load_trajectories",
    "Trajectories",
    "Windows",
    "register_envs",
]

_MODULES = modules_by_name(
    {
        "rlxf.envs.make": ("make_vec_env", "make_env"),
        "rlxf.envs.curriculum": ("Curriculum", "CurriculumCallback", "CurriculumEnv"),
        "rlxf.envs.spaces": ("check_spaces",),
        "rlxf.envs.stitching_data": ("RoadFollower", "road_episodes"),
        "rlxf.envs.stitching_maze": ("StitchingMaze",),
        "rlxf.envs.tmaze": ("TMaze",),
        "rlxf.envs.tmaze_vector": ("TMazeVector",),
        "rlxf.envs.return_to_go": ("ReturnToGo",),
        "rlxf.envs.wrappers": ("PreviousReward", "PreviousStep", "PreviousTransition"),
        "rlxf.envs.action_replay": ("ActionReplay",),
        "rlxf.envs.masked_velocities": ("MaskedVelocities",),
        "rlxf.envs.tensor_vec_env": ("as_vec_env", "TensorVecEnv"),
        "rlxf.envs.tmaze_tensor": ("TMazeTensor",),
        "rlxf.envs.vector": ("StatefulVectorEnv", "GymnasiumVecEnv"),
        "rlxf.envs.worker_pool": ("Workers",),
        "rlxf.envs.worker_vec_env": ("WorkerVecEnv",),
        "rlxf.utils.errors": ("FaultyEnvironmentError", "BrokenEnvironmentError"),
        "rlxf.data": ("load_trajectories", "Trajectories", "Windows"),
    }
)

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = lazy_attributes(globals(), _MODULES)
