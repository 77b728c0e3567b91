"""Which observation and action spaces the agents take."""

from gymnasium import spaces

from rlxf.envs.trajectories.parts import FLAT, is_nothing_but_text, is_text, parts_of

Space = spaces.Space

_ALLOWED = (
    "observations: Box (vector, or image uint8), Discrete, MultiDiscrete, MultiBinary, or a Dict of these; "
    "actions: Box, Discrete, MultiDiscrete, MultiBinary"
)
_REMEDY = "wrap the environment, for example with gymnasium.wrappers.FlattenObservation"
_PLAYABLE = "Box, Discrete, MultiDiscrete and MultiBinary"


def check_playable(observation_space: Space, action_space: Space) -> None:
    """Refuse spaces that no agent here can read or act in.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these, nested at
    will, with text beside them, which is not read. Allowed actions: the first four. A `GTrXLPPO` takes fewer,
    see `check_spaces`, and a `DecisionTransformer` those of its data.

    Raises:
        TypeError: naming the part, and what is allowed.
    """
    if is_nothing_but_text(observation_space):
        raise TypeError(f"observation space {observation_space} holds nothing that is no text")
    _check_parts(observation_space, "observation space")
    if not isinstance(action_space, FLAT):
        raise TypeError(f"action space {action_space} is not supported. Allowed are {_PLAYABLE}")


def _check_parts(space: Space, where: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space).items():
            _check_parts(part, f"{where}[{key!r}]")
    elif not (isinstance(space, FLAT) or is_text(space)):
        raise TypeError(
            f"{where} {space} is not supported. Allowed are {_PLAYABLE}, Dict and Tuple of these, and text "
            f"beside them; leave it out with a wrapper"
        )


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Refuse spaces that no policy of `GTrXLPPO` can read or act in.

    Allowed observations: Box, Discrete, MultiDiscrete, MultiBinary, and a Dict of these that holds no
    other Dict. Allowed actions: the same without Dict; a Box of actions needs finite bounds and real
    numbers. Nothing may be empty. As in Stable-Baselines3, MultiDiscrete and MultiBinary have one axis, and
    observations count from 0; actions may count from any number.

    Raises:
        TypeError: naming the space, what is wrong with it and what is allowed.
    """
    named = (
        observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    )
    _check("observation space", observation_space, None if named else "is empty")
    for key, space in named.items():
        where = "observation space" + (f" {key!r}" if key else "")
        _check(where, space, _flat_fault(space) or _counting_fault(space))
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


def _counting_fault(space: Space) -> str | None:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (space.start != 0).any():
        return f"starts at {space.start}, not at 0"
    return None


def _action_fault(space: Space) -> str | None:
    if not isinstance(space, spaces.Box):
        return None
    if not space.is_bounded():
        return "has no finite bounds"
    return None if space.dtype.kind == "f" else f"holds {space.dtype}, not real numbers: use MultiDiscrete"
