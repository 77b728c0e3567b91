"""Registration of the package's environments with Gymnasium. It imports only Gymnasium, so it is fast."""

from gymnasium.envs.registration import EnvSpec, register, registry

_ENTRY_POINT = "rlxf.envs.tmaze.env:TMaze"
_CHECKED = {"corridor_length", "active", "penalty", "penalty_rule"}
_KWARGS: dict[str, dict[str, object]] = {
    "rlxf/TMaze-v0": {"corridor_length": 50, "active": False},
    "rlxf/TMazeActive-v0": {"corridor_length": 50, "active": True},
}


def register_envs() -> None:
    """Register ``rlxf/TMaze-v0`` and ``rlxf/TMazeActive-v0``; a second call has no effect.

    ``import rlxf`` calls this function, because Gymnasium 1.x does not discover plugins.
    """
    for env_id, kwargs in _KWARGS.items():
        if env_id not in registry:
            register(
                env_id,
                entry_point=_ENTRY_POINT,
                vector_entry_point="rlxf.envs.tmaze.vector:TMazeVector",
                kwargs=kwargs,
            )


def checks_argument(spec: EnvSpec, name: str) -> bool:
    """Return whether ``spec`` is a task of this package that rejects harmful values of argument ``name``."""
    return spec.entry_point == _ENTRY_POINT and name in _CHECKED
