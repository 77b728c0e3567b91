"""Which observation and action spaces the agents take."""

from gymnasium import spaces

Space = spaces.Space

_FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_ALLOWED = (
    "observations: Box (vector, or image uint8), Discrete, MultiDiscrete, MultiBinary, or a Dict of these; "
    "actions: Box, Discrete, MultiDiscrete, MultiBinary"
)
_REMEDY = "wrap the environment, for example with gymnasium.wrappers.FlattenObservation"


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Refuse spaces that no policy here can read or act in.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and a Dict of these that holds no
    other Dict. Allowed actions: the same without Dict; a Box of actions needs finite bounds and real
    numbers. Nothing may be empty. As in Stable-Baselines3, Discrete and MultiDiscrete count from 0,
    MultiDiscrete and MultiBinary have one axis.

    Raises:
        TypeError: naming the space, what is wrong with it and what is allowed.
    """
    named = (
        observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    )
    _check("observation space", observation_space, None if named else "is empty")
    for key, space in named.items():
        _check("observation space" + (f" {key!r}" if key else ""), space, _flat_fault(space))
    _check("action space", action_space, _flat_fault(action_space) or _action_fault(action_space))


def _check(where: str, space: Space, fault: str | None) -> None:
    if fault:
        raise TypeError(f"{where} {space} {fault}. Allowed are {_ALLOWED}. Otherwise {_REMEDY}")


def _flat_fault(space: Space) -> str | None:
    if not isinstance(space, _FLAT):
        return f"is a {type(space).__name__}, which is not supported"
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (space.start != 0).any():
        return f"starts at {space.start}, not at 0"
    axes = len(space.shape or ())
    if axes > 1 and not isinstance(space, spaces.Box):
        return f"has {axes} axes, not one"
    if axes == 0 and isinstance(space, spaces.Box):
        return "has no axis"
    return "is empty" if 0 in (space.shape or ()) else None


def _action_fault(space: Space) -> str | None:
    if not isinstance(space, spaces.Box):
        return None
    if not space.is_bounded():
        return "has no finite bounds"
    return None if space.dtype.kind == "f" else f"holds {space.dtype}, not real numbers: use MultiDiscrete"
