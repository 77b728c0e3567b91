"""Gymnasium environments that need memory, functions that create environments, and wrappers."""

if __name__ != "rlxf.envs":
    raise ImportError(
        f"imported as {__name__!r}: the top-level link is for readers; write 'import rlxf.envs'"
    )

from importlib import import_module

from rlxf.envs.specs import register_envs

register_envs()

_MODULES = {
    "make_vec_env": "rlxf.envs.make",
    "make_env": "rlxf.envs.make",
    "as_vec_env": "rlxf.envs.vector",
    "check_spaces": "rlxf.envs.spaces",
    "TMaze": "rlxf.envs.tmaze.env",
    "TMazeVector": "rlxf.envs.tmaze.vector",
    "PreviousReward": "rlxf.envs.wrappers.previous_step",
    "PreviousStep": "rlxf.envs.wrappers.previous_step",
    "PreviousTransition": "rlxf.envs.wrappers.previous_step",
    "ReturnToGo": "rlxf.envs.wrappers.return_to_go",
    "ActionReplay": "rlxf.envs.stateful_env",
    "StatefulVectorEnv": "rlxf.envs.stateful_env",
    "GymnasiumVecEnv": "rlxf.envs.vector",
    "Workers": "rlxf.envs.workers",
    "WorkerVecEnv": "rlxf.envs.workers",
    "FaultyEnvironmentError": "rlxf.utils.errors",
    "BrokenEnvironmentError": "rlxf.utils.errors",
    "load_trajectories": "rlxf.data",
    "Trajectories": "rlxf.data",
    "Windows": "rlxf.data",
}
__all__ = [*_MODULES, "register_envs"]


def __getattr__(name: str) -> object:
    """Import the public object ``name`` from its module on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlxf.envs' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
