"""Weights and statistics shared by agents and by processes: transfer, broadcast, synchronization."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import Tensor, nn

from rlxf.agents.common.cores import core_difference
from rlxf.attention import Transformer, TransformerSpec
from rlxf.attention.parameter_checks import parameter_fault
from rlxf.training import CheckpointError
from rlxf.training.process_group import ProcessGroup

WEIGHTLESS_OPTIONS = ("causal", "memory", "pattern", "dropout", "feed_forward_chunk")
"""Options that may differ between the two cores, because usually no weight depends on them.

If a weight does depend on them, the error names its tensor.
"""


def transfer_weights(source: Any, target: nn.Module, parts: Sequence[str] = ("transformer",)) -> None:
    """Copy weights from an agent or a pre-training run to a model.

    The specs of both transformers must be equal except for `WEIGHTLESS_OPTIONS`. Weights of a bidirectional
    core therefore fit a causal one, with or without memory. Weights of the memory are copied if both
    transformers have the same names and shapes there; else the target keeps its own.

    Args:
        source: agent or pre-training run with the weights.
        target: model that receives them.
        parts: names of the modules to copy, which both models have.

    Raises:
        TypeError: if ``source`` has no transformer.
        ValueError: if the weights do not fit; the message names the first difference. Nothing is changed.
    """
    model = getattr(source, "policy", None)
    given, own = (getattr(each, "transformer", None) for each in (model, target))
    if not isinstance(given, Transformer):
        raise TypeError(
            f"the source of weights must be a MaskedPretraining, a DecisionTransformer or a GTrXLPPO, got "
            f"{source!r}"
        )
    assert isinstance(own, Transformer)
    check_same_core(given.spec, own.spec)
    states = {part: getattr(model, part).state_dict() for part in parts}
    states["transformer"] = merge_memory_weights(given, own)
    for part, state in states.items():
        check_tensors(part, state, getattr(target, part).state_dict())
    if (fault := parameter_fault(given)) is not None:
        raise ValueError(
            f"the weights of the source are not valid: {fault}; load an earlier checkpoint of it"
        )
    for part, state in states.items():
        getattr(target, part).load_state_dict(state)


def merge_memory_weights(given: Transformer, own: Transformer) -> dict[str, Tensor]:
    """Return the state dict of ``given``; its memory weights come from ``own`` if names or shapes differ.

    Args:
        given: transformer with the pretrained weights.
        own: transformer of the agent that receives them.
    """
    source, target = memory_weights(given), memory_weights(own)
    if {name: x.shape for name, x in source.items()} == {name: x.shape for name, x in target.items()}:
        return given.state_dict()
    return {name: x for name, x in given.state_dict().items() if name not in source} | target


def memory_weights(transformer: Transformer) -> dict[str, Tensor]:
    """Return the weights, by name, that exist only because the transformer has a memory."""
    with torch.device("meta"):  # only the names are needed
        without = replace(transformer.spec, memory=None).build().state_dict()
    return {name: x for name, x in transformer.state_dict().items() if name not in without}


def check_same_core(given: TransformerSpec, own: TransformerSpec) -> None:
    """Raise ValueError unless the specs are equal except for `WEIGHTLESS_OPTIONS`; name the first
    difference.
    """
    if difference := core_difference(given, own, WEIGHTLESS_OPTIONS):
        name, source, target = difference
        raise ValueError(
            f"the weights do not fit: their core has {name}={source}, the agent's has {name}={target}; build "
            f"both with the same core"
        )


@contextmanager
def core_error_context(stored: TransformerSpec, given: TransformerSpec | None) -> Iterator[None]:
    """Add the option in which a passed core differs from the stored one to errors raised while loading.

    Args:
        stored: the core in the file.
        given: the core passed to ``load``; None if none was passed.

    Raises:
        CheckpointError: in place of an error that only reports that the weights do not fit.
    """
    try:
        yield
    except CheckpointError as error:
        difference = None if given is None else core_difference(stored, given, WEIGHTLESS_OPTIONS)
        if difference is None:
            raise
        name, source, target = difference
        raise CheckpointError(
            f"the checkpoint's weights do not fit the core that was passed: the core in the file has "
            f"{name}={source}, the one passed {name}={target}; load without core=..., or pass an equal core"
        ) from error


def check_tensors(part: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both dictionaries have the same names and shapes; name the first difference.

    Args:
        part: name of the module, for the message.
        given: new tensors by name.
        own: current tensors of the agent by name.
    """
    for name in [*own, *(name for name in given if name not in own)]:
        source, target = (tuple(state[name].shape) if name in state else "none" for state in (given, own))
        if source != target:
            raise ValueError(
                f"the weights do not fit: {name} of {part} is {source}, the agent's is {target}; build both "
                f"with the same settings"
            )


def check_stored_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if tensors of a file would make a recurrent state overflow.

    Args:
        model: model with a transformer, which is not changed.
        tensors: tensors of the model by name.
    """
    prefix = "transformer."
    stored = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    if (fault := parameter_fault(model.transformer, stored)) is not None:
        raise CheckpointError(f"the checkpoint's weights are not valid: {fault}; load an earlier checkpoint")


class SyncedRunningMeanStd(RunningMeanStd):
    """Running mean and variance of the data of all processes, with the same values in each process.

    If a row of any process is not finite, no process updates its statistics. The process with that row then
    stops the training (`rlxf.agents.common.numerics`).

    Copies, also those in files of pickle, are a plain ``RunningMeanStd``: only the training environments of
    all processes update their statistics at the same time.

    Args:
        known: current statistics.
        ranks: the process group; each process contributes the same number of rows.
    """

    def __init__(self, known: RunningMeanStd, ranks: ProcessGroup):
        super().__init__()
        self.mean = known.mean
        self.var = known.var
        self.count = known.count
        self._ranks = ranks

    def update(self, arr: np.ndarray) -> None:
        """Update the statistics with the rows (N, ...) of this process and those of all other processes."""
        every = self._ranks.all_gather(torch.as_tensor(arr)).numpy()
        if np.isfinite(every).all():
            super().update(every)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunningMeanStd, (), {"mean": self.mean, "var": self.var, "count": self.count}


def sync_normalization_statistics(env: VecEnv | None, ranks: ProcessGroup) -> None:
    """Synchronize the statistics of a ``VecNormalize`` across all processes at every step."""
    normalizer = unwrap_vec_normalize(env)  # type: ignore[arg-type]  # None has none
    if normalizer is None or ranks.world_size == 1:
        return
    normalizer.ret_rms = SyncedRunningMeanStd(normalizer.ret_rms, ranks)
    if not normalizer.norm_obs:  # then there are no statistics of observations
        return
    if isinstance(normalizer.obs_rms, dict):
        normalizer.obs_rms = {
            key: SyncedRunningMeanStd(each, ranks) for key, each in normalizer.obs_rms.items()
        }
    else:
        normalizer.obs_rms = SyncedRunningMeanStd(normalizer.obs_rms, ranks)


def sync_processes(
    ranks: ProcessGroup,
    policy: nn.Module,
    generator: torch.Generator,
    set_logger: Callable[[Logger], None],
    **numbers: int,
) -> None:
    """Synchronize weights and generators of all processes, and disable the logs of all but the first.

    Args:
        ranks: the process group.
        policy: network of the agent; all processes get the weights of the first one.
        generator: generator of minibatches; all processes get the state of the first one.
        set_logger: method of the agent that replaces its logger.
        numbers: numbers that must be equal in all processes, e.g. the steps to train for.

    Raises:
        ValueError: if a number differs between processes.
        ConnectionError: if a process has ended.
    """
    ranks.check_equal_on_ranks(numbers)
    ranks.broadcast_module(policy, generator)
    if not ranks.is_main:
        set_logger(Logger(folder=None, output_formats=[]))
