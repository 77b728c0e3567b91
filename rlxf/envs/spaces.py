"""Checks of observation and action spaces."""

from gymnasium import spaces

from rlxf.data.spaces import FLAT, is_text, is_text_only, leaves

Space = spaces.Space

_ALLOWED = (
    "observations: Box (vector, or image uint8), Discrete, MultiDiscrete, MultiBinary, or a Dict of these; "
    "actions: Box, Discrete, MultiDiscrete, MultiBinary"
)
_REMEDY = "wrap the environment, for example with gymnasium.wrappers.FlattenObservation"
_PLAYABLE = "Box, Discrete, MultiDiscrete and MultiBinary"


def check_playable(observation_space: Space, action_space: Space) -> None:
    """Raise unless some agent of this package supports the spaces.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these, nested to
    any depth. They may also contain text, which the agents ignore. Allowed actions: the first four.
    `GTrXLPPO` supports fewer spaces (`check_spaces`), and a `DecisionTransformer` those of its data.

    Raises:
        TypeError: with the unsupported part and the allowed spaces.
    """
    if is_text_only(observation_space):
        raise TypeError(f"observation space {observation_space} has only text parts, and agents ignore text")
    for where, part in leaves(observation_space, "observation space"):
        if not (isinstance(part, FLAT) or is_text(part)):
            raise TypeError(
                f"{where} {part} is not supported. Allowed are {_PLAYABLE}, and Dict and Tuple of these, "
                f"which may also contain text; remove the part with a wrapper"
            )
    if not isinstance(action_space, FLAT):
        raise TypeError(f"action space {action_space} is not supported. Allowed are {_PLAYABLE}")


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Raise unless the policies of `GTrXLPPO` support the spaces.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and a Dict of these without nested
    Dicts. Allowed actions: the same without Dict; a Box of actions needs finite bounds and a float dtype.
    No space may be empty. As in Stable-Baselines3, MultiDiscrete and MultiBinary have one axis, and discrete
    observations start at 0; discrete actions may start at any number.

    Raises:
        TypeError: with the space, its fault and the allowed spaces.
    """
    parts = (
        observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    )
    _check("observation space", observation_space, None if parts else "is empty")
    for key, space in parts.items():
        where = "observation space" + (f" {key!r}" if key else "")
        _check(where, space, _flat_fault(space) or _start_fault(space))
    _check("action space", action_space, _flat_fault(action_space) or _action_fault(action_space))


def _check(where: str, space: Space, fault: str | None) -> None:
    if fault:
        raise TypeError(f"{where} {space} {fault}. Allowed are {_ALLOWED}. Otherwise {_REMEDY}")


def _flat_fault(space: Space) -> str | None:
    if not isinstance(space, FLAT):
        return f"is a {type(space).__name__}, which is not supported"
    axes = len(space.shape or ())
    if axes > 1 and not isinstance(space, spaces.Box):
        return f"has {axes} axes, not one"
    if axes == 0 and isinstance(space, spaces.Box):
        return "has no axis"
    return "is empty" if 0 in (space.shape or ()) else None


def _start_fault(space: Space) -> str | None:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (space.start != 0).any():
        return f"starts at {space.start}, not at 0"
    return None


def _action_fault(space: Space) -> str | None:
    if not isinstance(space, spaces.Box):
        return None
    if not space.is_bounded():
        return "has no finite bounds"
    return None if space.dtype.kind == "f" else f"holds {space.dtype}, not real numbers: use MultiDiscrete"
