"""Checks of arguments that all agents share, and arguments of Stable-Baselines3 without support."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from stable_baselines3.common.utils import get_system_info
from torch import Tensor

from rlxf.attention.technique import check_int
from rlxf.utils.names import did_you_mean
from rlxf.utils.warnings import warn_user

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class UnsupportedArgument:
    """An argument of Stable-Baselines3 that does not exist here.

    Args:
        advice: the reason and the alternative, appended to the error message.
        neutral: accepted values that have no effect, e.g. the default of Stable-Baselines3.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


def reject_unknown_arguments(
    refused: Mapping[str, UnsupportedArgument],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method so that an unknown keyword raises a TypeError with advice.

    The error for a ``refused`` keyword names the alternative. The error for any other keyword names the most
    similar parameter. A refused keyword with a neutral value is dropped. The signature is preserved.

    Args:
        refused: keywords of Stable-Baselines3 that the function does not accept.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = list(inspect.signature(function).parameters)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            owner = type(args[0]).__name__ + f".{function.__name__}".removesuffix(".__init__")
            for name in sorted(kwargs.keys() - known):
                _check_neutral(owner, name, kwargs.pop(name), known, refused.get(name))
            return function(*args, **kwargs)

        return checked

    return decorate


def load_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments among the keywords of ``load``, without those of SB3's ``load``.

    ``custom_objects`` holds constructor arguments; those passed as keywords take precedence.
    ``print_system_info=True`` prints the versions on this machine. ``force_reset=True`` has no effect.

    Raises:
        ValueError: if ``force_reset`` is False, since the file of an agent does not hold its episodes.
    """
    own = dict(settings)
    if own.pop("print_system_info", False):
        get_system_info()
    if not own.pop("force_reset", True):
        raise ValueError(
            "force_reset=False is not possible, since the file of an agent does not hold its episodes: to "
            "continue a training in the middle of the episodes use learn(..., resume_from=FILE)"
        )
    replaced = dict(own.pop("custom_objects", None) or {})
    if "policy_class" in replaced:
        replaced["policy"] = replaced.pop("policy_class")
    return replaced | own


def _check_neutral(
    owner: str, name: str, value: Any, known: list[str], refused: UnsupportedArgument | None
) -> None:
    if refused is None:
        public = [each for each in known if each != "self" and not each.startswith("_")]
        hint = did_you_mean(name, public, f"it takes {', '.join(public)}")
        raise TypeError(f"{owner} takes no argument {name!r}{hint}")
    if not any(value is each or value == each for each in refused.neutral):
        raise TypeError(f"{owner} takes no argument {name!r}: {refused.advice}")


def check_device(device: torch.device | str) -> None:
    """Check that a device exists. Stable-Baselines3 silently uses the CPU instead of a missing GPU.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1" ... or a ``torch.device``.

    Raises:
        ValueError: if torch does not support the device, or the GPU does not exist.
    """
    if device == "auto":
        return
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}: {error}") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested.type == "cuda" and (requested.index or 0) >= gpus:
        raise ValueError(
            f"device={str(device)!r} requires a GPU that does not exist: torch finds {gpus or 'none'} on "
            f"this machine; use device='cpu', or 'auto', which uses a GPU if there is one"
        )


def as_python_number(value: Any, whole: bool) -> Any:
    """Convert a scalar of NumPy, and an integral float if the number is whole; return other values as is."""
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def as_whole_number(name: str, value: Any, least: int) -> int:
    """Return an integer, or another number with an integral value such as 1e5, as an int.

    Raises:
        TypeError: if the value is not a number.
        ValueError: if it has a fraction, is not finite, or is less than ``least``.
    """
    number = as_python_number(value, whole=True)
    if isinstance(number, float):
        raise ValueError(f"{name} must be a whole number, got {number}")
    check_int(name, number, least, sys.maxsize)
    return int(number)


def as_log_interval(value: Any) -> int:
    """Return the argument ``log_interval`` as an int; None, for no log as in SB3, becomes the largest one.

    Raises:
        TypeError, ValueError: as `as_whole_number`.
    """
    return sys.maxsize if value is None else as_whole_number("log_interval", value, least=1)


PATIENCE = 10
"""Consecutive calls without state or episode_start after which a mistake is assumed."""


def check_state_type(state: Any, expected: type, advice: str) -> None:
    """Raise TypeError, with an advice, unless a state passed to ``predict`` is of the expected class."""
    if not isinstance(state, expected):
        raise TypeError(f"state must be one that predict returned, got {type(state).__name__}; {advice}")


def check_state_rows(rows: Tensor, batch: int, device: torch.device, advice: str) -> None:
    """Check that a state passed to ``predict`` is of the environments of the observation.

    Args:
        rows: tensor of the state with one row for each of its environments.
        batch: number of observations.
        device: device of the agent.
        advice: end of the message.

    Raises:
        ValueError: if the number of environments or the device differs.
    """
    if len(rows) != batch:
        raise ValueError(f"the state is of {len(rows)} environments, the observation of {batch}; {advice}")
    if rows.device != device:
        raise ValueError(f"the state is on {rows.device}, the agent on {device}; {advice}")


def check_state_layout(given: Mapping[str, object], own: Mapping[str, object], advice: str) -> None:
    """Raise ValueError, with an advice, unless caches of two cores have equal parts (`KVCache.layout`)."""
    if given == own:
        return
    name = next(name for name in {**own, **given} if given.get(name) != own.get(name))
    raise ValueError(
        f"the state is of another core: {name} is {given.get(name)} in the state, {own.get(name)} in this "
        f"agent; {advice}"
    )


class MissingStateWarning:
    """Warn once if an agent with memory predicts without the state of the previous step.

    The warning is issued if there is no state although ``episode_start`` marks an observation as not the
    first of its episode. It is also issued at the `PATIENCE`-th consecutive call with neither a state nor
    ``episode_start``. To predict for independent observations, pass
    ``episode_start=np.ones(n, dtype=bool)``: these calls are never counted.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def record(self, state: Any, first: bool | None) -> None:
        """Record a call.

        Args:
            state: the state that was passed; None if there was none.
            first: whether all observations are the first of their episodes; None if unknown.
        """
        if self._warned:
            return
        self._in_a_row = self._in_a_row + 1 if state is None and first is None else 0
        if self._in_a_row == PATIENCE:
            self._warn(f"predict was called {PATIENCE} times in a row with neither state nor episode_start")
        if state is None and first is False:
            self._warn("predict got no state, although episode_start marks an episode as continuing")

    def _warn(self, problem: str) -> None:
        self._warned = True
        warn_user(
            f"{problem}, so the agent acts without memory, as in the first step of an episode: pass the "
            f"state of the previous call, actions, state = agent.predict(obs, state, episode_start); for "
            f"independent observations pass episode_start=np.ones(n, dtype=bool)"
        )


def _use_learn_online(use: str) -> UnsupportedArgument:
    return UnsupportedArgument(
        f"the agent learns from a dataset; to continue in an environment use learn_online({use})"
    )


_NETWORK = UnsupportedArgument(
    "the network is a transformer; use core=decision_transformer(...)", neutral=(None, {})
)
_REPLAY = UnsupportedArgument(
    "batches are drawn from the dataset, and by learn_online from its replay of replay_episodes=... episodes",
    neutral=(None, {}, False),
)
_RETURNS = UnsupportedArgument(
    "returns are sums of rewards without discount; to scale them use return_scale=..."
)
_NO_TARGET = UnsupportedArgument("there is no target network; leave it out")
_TARGET_RATE = UnsupportedArgument("only objective=QRegularized(target_rate=...) has target networks")
_NO_EXPLORATION = "the agent explores by sampling its actions; use objective=MaximumEntropy(...)"
_ENTROPY = UnsupportedArgument("only objective=MaximumEntropy(...) has an entropy coefficient")
_DATASET_SPACE = UnsupportedArgument("the spaces are those of the dataset; leave it out")
_SCHEDULE = UnsupportedArgument("use learning_rate, which may be a schedule")

OFFLINE_SB3_ARGUMENTS = {
    **dict.fromkeys(("policy", "policy_kwargs", "net_arch"), _NETWORK),
    "buffer_size": _use_learn_online("replay_episodes=..."),
    "n_envs": _use_learn_online("n_envs=..."),
    **dict.fromkeys(("n_steps", "train_freq"), _use_learn_online("round_steps=...")),
    **dict.fromkeys(("gradient_steps", "n_epochs"), _use_learn_online("round_updates=...")),
    "learning_starts": UnsupportedArgument(
        "the agent learns from the dataset from the beginning, and the replay of learn_online starts with it"
    ),
    **dict.fromkeys(("replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"), _REPLAY),
    **dict.fromkeys(("gamma", "gae_lambda"), _RETURNS),
    **dict.fromkeys(("tau", "target_update_interval"), _TARGET_RATE),
    **dict.fromkeys(("ent_coef", "target_entropy"), _ENTROPY),
    "action_noise": UnsupportedArgument(
        f"{_NO_EXPLORATION}, or objective=QRegularized(...) and learn_online(exploration_noise=...)",
        neutral=(None,),
    ),
    "use_sde": UnsupportedArgument(_NO_EXPLORATION, neutral=(False,)),
    "total_timesteps": UnsupportedArgument("pass the number of updates to learn(steps=...)"),
    **dict.fromkeys(("observation_space", "action_space"), _DATASET_SPACE),
    "lr_schedule": _SCHEDULE,
}
"""Unsupported arguments of the constructors."""

_NO_ENV = UnsupportedArgument("the agent learns from a dataset only, without environments; leave it out")
MLP_SB3_ARGUMENTS = OFFLINE_SB3_ARGUMENTS | {
    **dict.fromkeys(
        ("policy", "policy_kwargs", "net_arch"),
        UnsupportedArgument("the network has the hidden layers hidden_sizes=(...)", neutral=(None, {})),
    ),
    **dict.fromkeys(("buffer_size", "n_envs", "n_steps", "train_freq"), _NO_ENV),
    **dict.fromkeys(("gradient_steps", "n_epochs", "learning_starts"), _NO_ENV),
    **dict.fromkeys(
        ("replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"),
        UnsupportedArgument("batches are drawn from the dataset; leave it out", neutral=(None, {}, False)),
    ),
    **dict.fromkeys(
        ("gamma", "gae_lambda"),
        UnsupportedArgument("returns are sums of rewards without discount; leave it out"),
    ),
    **dict.fromkeys(("tau", "target_update_interval"), _NO_TARGET),
    "action_noise": UnsupportedArgument(_NO_EXPLORATION, neutral=(None,)),
}
"""Unsupported arguments of the constructors of agents with a multilayer perceptron."""

SB3_LEARN_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("it counts updates, not steps of an environment; use steps=...")
}
"""Unsupported arguments of ``learn``."""

SB3_ONLINE_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("use steps=..., which counts steps over all environments"),
    "buffer_size": UnsupportedArgument("use replay_episodes=..."),
    "train_freq": UnsupportedArgument("use round_steps=..."),
    "gradient_steps": UnsupportedArgument("use round_updates=..."),
    "action_noise": UnsupportedArgument("use exploration_noise=..., a standard deviation", neutral=(None,)),
}
"""Unsupported arguments of ``learn_online``."""


_GSDE_OPTION = (
    "with use_sde, there is a deviation for each feature and action, and no gradient flows into the "
    "features; leave it out"
)
_OWN_BUFFER = UnsupportedArgument(
    "the rollout buffer stores segments with their memory and cannot be replaced; its sizes are n_steps, "
    "segment_length and n_envs",
    neutral=(None, {}),
)
_STORED_SPACE = UnsupportedArgument(
    "the file holds the spaces; pass env=... to use the agent in another environment with the same spaces"
)
_LAYERS = "the transformer replaces {}; use core=gtrxl({})"
_NET_ARCH = _LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=...")
_SHARED = "actor and critic share the transformer; leave it out"

PPO_SB3_ARGUMENTS = {
    **dict.fromkeys(("rollout_buffer_class", "rollout_buffer_kwargs"), _OWN_BUFFER),
    "lr_schedule": _SCHEDULE,
    **dict.fromkeys(("observation_space", "action_space"), _STORED_SPACE),
    "net_arch": UnsupportedArgument(_NET_ARCH),
}
"""Unsupported arguments of the constructors."""

SB3_POLICY_ARGUMENTS = {
    "net_arch": UnsupportedArgument(_NET_ARCH, neutral=(None,)),
    "activation_fn": UnsupportedArgument(
        "the activation belongs to the transformer; use core=TransformerSpec(activation='gelu', ...)"
    ),
    "ortho_init": UnsupportedArgument(
        "weights outside of the transformer are always orthogonal; leave it out", neutral=(True,)
    ),
    "full_std": UnsupportedArgument(_GSDE_OPTION, neutral=(True,)),
    "use_expln": UnsupportedArgument(
        "deviations of use_sde are exponentials; leave it out", neutral=(False,)
    ),
    "squash_output": UnsupportedArgument(
        "Box actions are clipped to their bounds, not squashed; leave it out", neutral=(False, None)
    ),
    "dist_kwargs": UnsupportedArgument(_GSDE_OPTION, neutral=(None, {})),
    "share_features_extractor": UnsupportedArgument(
        "actor and critic share the features extractor and the transformer; leave it out", neutral=(True,)
    ),
    "lstm_hidden_size": UnsupportedArgument(_LAYERS.format("the LSTM", "width=...")),
    "n_lstm_layers": UnsupportedArgument(_LAYERS.format("the LSTM", "layers=...")),
    "shared_lstm": UnsupportedArgument(_SHARED, neutral=(True,)),
    "enable_critic_lstm": UnsupportedArgument(_SHARED, neutral=(False,)),
    "lstm_kwargs": UnsupportedArgument(
        "there is no LSTM; use core=gtrxl(...) or core=TransformerSpec(...)", neutral=(None, {})
    ),
}
"""Unsupported arguments of the policies, i.e. entries of ``policy_kwargs`` in SB3."""
