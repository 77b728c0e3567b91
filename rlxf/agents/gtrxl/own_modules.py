"""Checks of features extractors and heads that a user defines, before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.gtrxl.action_heads import make_action_head
from rlxf.agents.gtrxl.extractors import BUILT_IN_EXTRACTORS
from rlxf.agents.gtrxl.observations import map_obs
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.data.spaces import parts_by_key
from rlxf.utils.warnings import warn_user


def check_own_modules(policy: GTrXLPolicy) -> None:
    """Check the types, shapes and dtypes of a features extractor and heads that a user defines.

    The policy is on the device of the agent. In its constructor, parts may be on several devices, such as a
    pretrained network that is already on the GPU.

    Raises:
        ValueError: if an output, or ``log_std``, has a wrong shape or dtype.
        TypeError: if a head is missing, or the value head is not a `PopArtHead`.
    """
    check_features(policy)
    check_heads(policy)


@contextmanager
def _restored_modes(*modules: nn.Module) -> Iterator[None]:
    """Restore the modes of modules and of their submodules at the end of the context."""
    modes = {each: each.training for module in modules for each in module.modules()}
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


@contextmanager
def trial_pass(device: torch.device, *modules: nn.Module) -> Iterator[None]:
    """Call modules in this context in evaluation mode, without gradient; random numbers are drawn again.

    Args:
        device: device of the modules.
        modules: modules that are called.
    """
    gpus = [device] if device.type == "cuda" else []
    with _restored_modes(*modules), torch.random.fork_rng(gpus), torch.no_grad():
        for module in modules:
            for each in module.modules():
                each.training = False
        yield


def check_features(policy: GTrXLPolicy) -> None:
    """Raise ValueError unless a user's extractor returns ``features_dim`` float32 features."""
    extractor = policy.features_extractor
    if type(extractor) in BUILT_IN_EXTRACTORS:
        return
    size = extractor.features_dim
    with trial_pass(policy.device, extractor):
        observation = map_obs(lambda part: part.to(policy.device), _observation(policy.observation_space))
        features: Any = policy.extract_features(observation, extractor)
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


def check_heads(policy: GTrXLPolicy) -> None:
    """Check the types and outputs of the heads of a policy that overrides `GTrXLPolicy.build_heads`.

    Raises:
        TypeError: if a head is missing, or the value head is not a `PopArtHead`.
        ValueError: if a head returns another number of outputs, or ``log_std`` does not fit the actions.
    """
    if type(policy).build_heads is GTrXLPolicy.build_heads:
        return
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
    with trial_pass(policy.device, policy.action_net, policy.value_net):
        latent = _latent(policy)
        _check_action_net(policy, latent)
        _check_output(f"value_net of {name}", policy.value_net(latent), (2, 1))


def _latent(policy: GTrXLPolicy) -> Tensor:
    """Return two different outputs (2, C) of the transformer."""
    return torch.tensor([[0.0], [1.0]]).repeat(1, policy.core.width).to(policy.device)


def _check_action_net(policy: GTrXLPolicy, latent: Tensor) -> None:
    """Raise ValueError unless ``action_net`` and ``log_std`` fit the action distribution of the space."""
    default = make_action_head(policy.action_space, policy.use_sde)
    if type(policy.action_head) is not type(default):
        return  # an action distribution of its own
    net, log_std = default.build(policy.core.width, 0.0)
    name = type(policy).__name__
    output: Tensor = net.to(latent.device)(latent)
    _check_output(f"action_net of {name}", policy.action_net(latent), tuple(output.shape))
    pair: tuple[Any, Any] = (policy.log_std, log_std)
    given, expected = (None if x is None else tuple(x.shape) for x in pair)
    if given != expected and (policy.use_sde or not _broadcasts(given, expected)):
        raise ValueError(f"log_std of {name} must have the shape {expected}, got {given}")


def _broadcasts(given: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> bool:
    """Return whether a shape broadcasts to a row of the expected shape (A,), as one or (1, A)."""
    if given is None or expected is None:
        return False
    row = (1, *expected)
    return len(given) <= len(row) and all(x in (1, y) for x, y in zip(given[::-1], row[::-1], strict=False))


def check_initial_values(policy: GTrXLPolicy) -> None:
    """Raise ValueError unless a new policy that overrides `GTrXLPolicy.build_heads` has values of 0."""
    if type(policy).build_heads is GTrXLPolicy.build_heads:
        return
    with trial_pass(policy.device, policy.value_net):
        values: list[float] = policy.value_net(_latent(policy))[:, 0].tolist()
    if any(values):
        raise ValueError(
            f"value_net of {type(policy).__name__} must return 0 before the first update, got {values}; set "
            f"its weights to 0 with self.init_weights(self.value_net, gain=0.0)"
        )


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


def warn_of_modes(policy: GTrXLPolicy) -> None:
    """Warn if a part of the features extractor or of a head acts in updates otherwise than in rollouts.

    Modules that remain in evaluation mode in updates, such as frozen layers, give no warning.
    """
    with _restored_modes(policy):
        policy.set_training_mode(True)
        for part in ("features_extractor", "action_net", "value_net"):
            for name, module in getattr(policy, part).named_modules(prefix=part):
                if module.training and depends_on_mode(module):
                    warn_user(
                        f"{name} is {module}, which acts in updates otherwise than in rollouts: the ratio "
                        f"of PPO differs from 1 before the first update. Remove it; LayerNorm is the same in "
                        f"both"
                    )
