"""Steps of the network of a `GTrXLPolicy` while it acts: operation by operation, compiled or captured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor, nn

from rlxf.agents.common.captured_function import CapturedFunction, supports_graphs
from rlxf.agents.common.compiled_function import EQUAL_RESULTS, CompiledFunction, trace
from rlxf.agents.common.module_programs import ModulePrograms
from rlxf.agents.gtrxl.observations import as_step_input, map_obs, obs_tensors
from rlxf.attention.cache import KVCache
from rlxf.attention.functional_step import named_tensors, with_tensors
from rlxf.attention.linear import FORWARD_HOOKS
from rlxf.attention.token_index import TokenIndex, is_tracing
from rlxf.utils.errors import CompilationError

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy

FIXED = ("core", "plan")
"""Fields of caches that a compiled step holds as constants; all others are its arguments."""
HEADS = ("action_net", "value_net", "reconstruction_net")
"""Modules of a policy that are called after a step."""


class NetworkOutputs(NamedTuple):
    """Results of a step: tokens (E, C), outputs (E, C) for the heads, and inputs (L, E, C) of all layers."""

    tokens: Tensor
    latent: Tensor
    hidden: Tensor


def eager_step(
    policy: "GTrXLPolicy", obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache
) -> NetworkOutputs:
    """Run the network for one step of E environments, operation by operation, without gradient.

    Args:
        policy: the policy.
        obs: a batch of E observations.
        action: (E, A), the encoded previous actions.
        index: (E, 1), position and episode of the step.
        cache: KV cache, updated in place.
    """
    tokens = policy.tokens(obs, action)
    return NetworkOutputs(tokens, *policy.transformer.step(tokens, index, cache))


class CompiledStep(ModulePrograms["_CompiledFor"]):
    """Step that is compiled at its first call for each number of environments and dtype of observations.

    On a GPU, the step is captured as a CUDA graph instead. Outputs differ from those of `eager_step` by
    rounding. If a step can be neither compiled nor captured, this class warns once and runs `eager_step`. So
    does a step after its policy was moved to another kind of device.

    After modules of the policy were replaced, except for its heads, the step is compiled again. While one of
    them has hooks of the forward pass or an assigned ``forward``, which a compiled step would not call, this
    class warns once and runs `eager_step`.

    Args:
        device_type: type of the device, "cpu" or "cuda".
    """

    skipped = HEADS
    hooks = FORWARD_HOOKS

    def __call__(
        self, policy: "GTrXLPolicy", obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache
    ) -> NetworkOutputs:
        """Run the network for one step; see `eager_step`.

        Warns:
            UserWarning: once, if the step cannot be compiled or a module has hooks; the message names the
                reason.
        """
        moved = policy.device.type != self.device_type
        if is_tracing() or policy.training or moved or not self.is_usable:
            return eager_step(policy, obs, action, index, cache)
        obs = map_obs(as_step_input, obs)
        step = self._step_for(policy, obs, action, index, cache) or eager_step
        return step(policy, obs, action, index, cache)

    def _step_for(
        self, policy: "GTrXLPolicy", obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache
    ) -> "_CompiledFor | None":
        """Return the compiled step for these shapes and dtypes; None if it cannot be compiled."""
        if (patch := self._current_modules(policy).find_patch()) is not None:
            self._warn(f"{patch}, which a compiled step would not call")
            return None
        layout = (*((tuple(x.shape), x.dtype) for x in obs_tensors(obs)), tuple(cache.index.shape))
        if layout not in self._programs:
            try:
                self._programs[layout] = _CompiledFor(policy, obs, action, index, cache)
            except CompilationError as error:
                self.is_usable = False
                self._warn(str(error), EQUAL_RESULTS)
        return self._programs.get(layout)

    def _message(self, reason: str, effect: str) -> str:
        form = "captured as a CUDA graph" if self._captures else "compiled"
        return (
            f"the acting step is not {form}, because {reason}; torch runs its operations one by one{effect}"
        )


class _CompiledFor:
    """Compiled step for observations and caches of certain shapes; arguments as in `eager_step`."""

    def __init__(
        self, policy: "GTrXLPolicy", obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache
    ):
        _check(policy, cache)
        function = StepFunction(policy, obs, cache)
        self._groups = _group(function.names)
        self._slots = torch.arange(cache.index.shape[1], device=policy.device)
        self._replaced = function.replaced
        self._most = policy.core.max_positions
        function_class = CapturedFunction if supports_graphs(policy.device) else CompiledFunction
        try:
            self._run = function_class(function, self._arguments(obs, action, index, cache.copy()))
        except CompilationError:
            _check_extractor(policy, obs)
            raise

    def __call__(
        self, policy: "GTrXLPolicy", obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache
    ) -> NetworkOutputs:
        if self._most is not None and int(index.position.max()) >= self._most:
            return eager_step(policy, obs, action, index, cache)  # raises an error that names the position
        outputs = self._run(*self._arguments(obs, action, index, cache))
        cache.slot = (cache.slot + 1) % len(self._slots)
        new = dict(zip(self._replaced, outputs[3:], strict=True))
        cache.recurrent = with_tensors(cache.recurrent, new, "recurrent")
        return NetworkOutputs(*outputs[:3])

    def _arguments(self, obs: PyTorchObs, action: Tensor, index: TokenIndex, cache: KVCache) -> list[Tensor]:
        """Return the arguments of `StepFunction.forward`."""
        slot = self._slots[cache.slot : cache.slot + 1]
        arguments = [action, index.position, index.episode, slot, *obs_tensors(obs)]
        for path, fields in self._groups:
            part: Any = reduce(_part, path, cache)
            arguments += [_part(part, name) for name in fields]
        return arguments


def _check(policy: "GTrXLPolicy", cache: KVCache) -> None:
    """Raise CompilationError if a step has no compiled form; the message is the reason."""
    if policy.device.type != "cpu" and not supports_graphs(policy.device):
        raise CompilationError(f"only CPUs and CUDA GPUs are supported, and the agent is on {policy.device}")
    if type(cache) is not KVCache:
        raise CompilationError(f"the memory {policy.core.memory} has no compiled form")


def _check_extractor(policy: "GTrXLPolicy", obs: PyTorchObs) -> None:
    """Raise CompilationError if the features extractor of a policy cannot be traced."""
    inputs = preprocess_obs(obs, policy.observation_space, policy.normalize_images)
    extractor = policy.features_extractor
    try:
        trace(extractor, (inputs,))
    except CompilationError as error:
        raise CompilationError(f"of the features extractor {type(extractor).__name__}: {error}") from error


class StepFunction(nn.Module):
    """Step of a policy as a function of tensors.

    Args:
        policy: the policy.
        obs: observations of E environments, for their names.
        cache: a cache for E environments, for its structure.
    """

    def __init__(self, policy: "GTrXLPolicy", obs: PyTorchObs, cache: KVCache):
        super().__init__()
        self.policy = policy
        self._template = cache.copy()
        self._keys = sorted(obs) if isinstance(obs, dict) else None
        self.names = list(named_tensors(cache, skipped=FIXED))
        self.replaced = self._find_replaced(obs)
        """Names of the state's tensors that a step replaces; it updates the others in place."""

    def forward(
        self, action: Tensor, position: Tensor, episode: Tensor, slot: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a step.

        Args:
            action: (E, A), the encoded previous actions.
            position: (E, 1), position of the step.
            episode: (E, 1), episode of the step.
            slot: (1,) int64, slot of the step in ring buffers.
            tensors: observations (E, ...), then the tensors of the cache, which are updated in place.

        Returns:
            The `NetworkOutputs`, followed by the `replaced` tensors.
        """
        number = len(tensors) - len(self.names)
        obs = dict(zip(self._keys, tensors, strict=False)) if self._keys else tensors[0]
        state = dict(zip(self.names, tensors[number:], strict=True))
        cache = replace(with_tensors(self._template, state, skipped=FIXED), slot=slot)
        outputs = eager_step(self.policy, obs, action, TokenIndex(position, episode), cache)
        after = named_tensors(cache, skipped=FIXED)
        return *outputs, *(after[name] for name in self.replaced)

    @torch.no_grad()
    def _find_replaced(self, obs: PyTorchObs) -> list[str]:
        """Run a step on a copy of the cache, and return the names of the tensors that it replaces.

        Raises:
            CompilationError: if these are not exactly those of the recurrent state.
        """
        cache = self._template.copy()
        before = named_tensors(cache, skipped=FIXED)
        start = torch.zeros_like(cache.index.position[:, :1])
        action = torch.zeros(len(start), self.policy.encoded_action_width, device=start.device)
        eager_step(self.policy, obs, action, TokenIndex(start, start), cache)
        after = named_tensors(cache, skipped=FIXED)
        names = [name for name in self.names if after[name] is not before[name]]
        if names != [name for name in self.names if name.startswith("recurrent.")]:
            raise CompilationError(f"a step replaces other tensors than its recurrent state: {names}")
        return names


def _group(names: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Return the paths to the parts of a cache that hold tensors, each with the names of its tensors."""
    split = [name.rpartition(".") for name in names]
    return [
        (path.split("."), [name for _, _, name in group]) for path, group in groupby(split, key=itemgetter(0))
    ]


def _part(value: Any, name: str) -> Any:
    """Return a part of a cache by the name that `named_tensors` gives it."""
    if isinstance(value, dict):
        return value[name]
    return value[int(name)] if isinstance(value, list | tuple) else getattr(value, name)
