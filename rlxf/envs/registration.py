"""Makes the package's environments known to Gymnasium. Imports Gymnasium alone, so it is quick."""

from gymnasium.envs.registration import register, registry

_KWARGS: dict[str, dict[str, object]] = {
    "rlxf/TMaze-v0": {"corridor_length": 50, "active": False},
    "rlxf/TMazeActive-v0": {"corridor_length": 50, "active": True},
}


def register_envs() -> None:
    """Register ``rlxf/TMaze-v0`` and ``rlxf/TMazeActive-v0``; a second call changes nothing.

    Gymnasium calls this by itself when it is imported and the package is installed.
    """
    for env_id, kwargs in _KWARGS.items():
        if env_id not in registry:
            register(
                env_id,
                entry_point="rlxf.envs.tmaze:TMaze",
                vector_entry_point="rlxf.envs.tmaze_vector:TMazeVector",
                kwargs=kwargs,
            )
