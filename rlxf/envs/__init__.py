"""Gymnasium environments that need memory, functions that create environments, wrappers, and trajectories."""

if __name__ != "rlxf.envs":
    raise ImportError(
        f"imported as {__name__!r}: the top-level link is for readers; write 'import rlxf.envs'"
    )

from importlib import import_module

from rlxf.envs.registration import register_envs

register_envs()

_MODULES = {
    "TMaze": "rlxf.envs.tmaze",
    "TMazeVector": "rlxf.envs.tmaze_vector",
    "make_vec_env": "rlxf.envs.make",
    "make_env": "rlxf.envs.make",
    "as_vec_env": "rlxf.envs.vector",
    "GymnasiumVecEnv": "rlxf.envs.vector",
    "Workers": "rlxf.envs.workers",
    "WorkerVecEnv": "rlxf.envs.workers",
    "PreviousReward": "rlxf.envs.previous_reward",
    "PreviousStep": "rlxf.envs.previous_step",
    "PreviousTransition": "rlxf.envs.previous_transition",
    "ReturnToGo": "rlxf.envs.return_to_go",
    "Replayable": "rlxf.envs.replayable",
    "Resumable": "rlxf.envs.resumable",
    "check_spaces": "rlxf.envs.spaces",
    "FaultyEnvironmentError": "rlxf.envs.errors",
    "BrokenEnvironmentError": "rlxf.envs.errors",
    "load_trajectories": "rlxf.envs.trajectories",
    "Trajectories": "rlxf.envs.trajectories",
    "Windows": "rlxf.envs.trajectories",
}

__all__ = [
    "make_vec_env",
    "make_env",
    "as_vec_env",
    "check_spaces",
    "TMaze",
    "TMazeVector",
    "PreviousReward",
    "PreviousStep",
    "PreviousTransition",
    "ReturnToGo",
    "Replayable",
    "Resumable",
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


def __getattr__(name: str) -> object:
    """Import the public object ``name`` from its module on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlxf.envs' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
