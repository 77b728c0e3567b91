"""Checks of features extractors and heads that a user defines, before the first step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.gtrxl.action_heads import make_action_head
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.data.spaces import parts_by_key
from rlxf.utils.warnings import warn_user

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy


@contextmanager
def trial_pass(*modules: nn.Module) -> Iterator[None]:
    """Call modules in this context in evaluation mode, without gradient; random numbers are drawn again."""
    modes = {each: each.training for module in modules for each in module.modules()}
    try:
        for each in modes:
            each.training = False
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def check_features(
    extractor: nn.Module, size: int, space: spaces.Space[Any], extract: Callable[[Any], Any]
) -> None:
    """Raise ValueError unless an extractor returns ``size`` float32 features for an observation.

    Args:
        extractor: the features extractor.
        size: its ``features_dim``.
        space: space of an observation.
        extract: function that preprocesses a batch of observations and calls the extractor.
    """
    with trial_pass(extractor):
        features = extract(_observation(space))
    _check_output(f"{type(extractor).__name__}, whose features_dim is {size},", features, (1, size))


def _observation(space: spaces.Space[Any]) -> Any:
    """Return a batch of one observation: the numbers of the space that are nearest to 0."""
    parts = {key: _nearest_to_zero(part) for key, part in parts_by_key(space).items()}
    return parts.get(None, parts)


def _nearest_to_zero(space: Any) -> Tensor:
    zeros = np.zeros((1, *space.shape), space.dtype)
    return torch.as_tensor(zeros.clip(space.low, space.high) if isinstance(space, spaces.Box) else zeros)


def _check_output(name: str, output: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless an output is a float32 tensor of a shape."""
    if not isinstance(output, Tensor):
        raise ValueError(f"{name} must return a tensor of shape {shape}, got {type(output).__name__}")
    if output.shape != shape or output.dtype != torch.float32:
        raise ValueError(
            f"{name} must return a torch.float32 tensor of shape {shape}, got {output.dtype} of shape "
            f"{tuple(output.shape)}"
        )


HEADS = ("action_head", "action_net", "log_std", "value_net")
"""Attributes that `GTrXLPolicy.build_heads` sets."""


def check_heads(policy: "GTrXLPolicy") -> None:
    """Check the types and outputs of the heads of a policy that overrides `GTrXLPolicy.build_heads`.

    Raises:
        TypeError: if a head is missing, or the value head is not a `PopArtHead`.
        ValueError: if a head returns another number of outputs, or values other than 0.
    """
    name = type(policy).__name__
    if missing := [head for head in HEADS if not hasattr(policy, head)]:
        raise TypeError(
            f"build_heads of {name} must set {', '.join(missing)}: first call "
            f"super().build_heads(log_std_init)"
        )
    if not isinstance(policy.value_net, PopArtHead):
        raise TypeError(
            f"value_net of {name} must be a PopArtHead, which normalizes values by the returns, got "
            f"{type(policy.value_net).__name__}; derive its class from PopArtHead"
        )
    with trial_pass(policy.action_net, policy.value_net):
        latent = torch.stack([torch.zeros(policy.core.width), torch.ones(policy.core.width)])
        _check_action_net(policy, latent)
        values = policy.value_net(latent)
    _check_output(f"value_net of {name}", values, (2, 1))
    if values.any():
        raise ValueError(
            f"value_net of {name} must return 0 before the first update, got {values[:, 0].tolist()}; set "
            f"its weights to 0 with self.init_weights(self.value_net, gain=0.0)"
        )


def _check_action_net(policy: "GTrXLPolicy", latent: Tensor) -> None:
    """Raise ValueError unless ``action_net`` and ``log_std`` fit the action distribution of the space."""
    default = make_action_head(policy.action_space, policy.use_sde)
    if type(policy.action_head) is not type(default):
        return  # an action distribution of its own
    net, log_std = default.build(policy.core.width, 0.0)
    name = type(policy).__name__
    output: Tensor = net(latent)
    _check_output(f"action_net of {name}", policy.action_net(latent), tuple(output.shape))
    pair: tuple[Any, Any] = (policy.log_std, log_std)
    given, expected = (None if x is None else tuple(x.shape) for x in pair)
    if given != expected:
        raise ValueError(f"log_std of {name} must have the shape {expected}, got {given}")


WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)
"""Modules of torch with an option for dropout."""


def depends_on_mode(module: nn.Module) -> bool:
    """Return whether outputs of a module differ between training mode and evaluation mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, WITH_DROPOUT):
        return bool(module.dropout)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, nn.modules.batchnorm._BatchNorm | nn.RReLU)


def warn_of_modes(policy: "GTrXLPolicy") -> None:
    """Warn if a part of the features extractor or of a head acts in updates otherwise than in rollouts."""
    for part in ("features_extractor", "action_net", "value_net"):
        for name, module in getattr(policy, part).named_modules():
            if depends_on_mode(module):
                path = f"{part}.{name}" if name else part
                warn_user(
                    f"{path} is {module}, which acts in updates otherwise than in rollouts: the ratio of PPO "
                    f"differs from 1 before the first update. Remove it; LayerNorm is the same in both"
                )
