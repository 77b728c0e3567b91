"""Checks of transformers on an accelerator, for a process that has it."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlxf.attention import Context, TokenIndex, Transformer, TransformerSpec
from rlxf.attention.heads.base import Datastore, TorchSearch
from rlxf.attention.memory.base import State
from rlxf.attention.registry import HEADS
from rlxf.attention.sparse import plan
from tests.attention.passes import assert_close_for_dtype
from tests.attention.specs import new_model
from tests.attention.worlds import Segment, numbers, random_index, random_segment
from tests.devices import accelerator
from tests.devices.accelerator import NAME

LENGTH = 12


def moved(index: TokenIndex) -> TokenIndex:
    """Return an index on the device, without known values on the CPU."""
    return TokenIndex(index.position.to(NAME), index.episode.to(NAME))


def segment_on_device(run: Segment) -> Segment:
    """Return a segment on the device."""
    context = run.context and Context(run.context.x.to(NAME), moved(run.context.index))
    return Segment(run.x.to(NAME), moved(run.index), context)


def assert_equal_to_cpu(actual: Tensor, expected: Tensor) -> None:
    """Assert that a tensor is on the device and equals that of the CPU, apart from rounding."""
    assert accelerator.is_on_device(actual), f"a tensor of shape {tuple(actual.shape)} is on {actual.device}"
    if expected.is_floating_point():
        assert_close_for_dtype(actual.detach().cpu(), expected.detach())
    else:
        assert torch.equal(actual.cpu(), expected)


def check_learning(spec: TransformerSpec) -> None:
    """Compare two consecutive segments with memory, gradients and the update of techniques with the CPU."""
    models = own, expected = new_model(spec).double().to(NAME), new_model(spec).double()
    run = random_segment(spec, random_index(2, LENGTH))
    outputs = [_segments(model, run if model is expected else segment_on_device(run)) for model in models]
    for y, z in zip(*outputs, strict=True):
        assert_equal_to_cpu(y, z)
    for (name, one), other in zip(own.named_parameters(), expected.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None, name
        else:
            assert_equal_to_cpu(one.grad, other.grad)
    for one, other in zip(own.state_dict().values(), expected.state_dict().values(), strict=True):
        assert_equal_to_cpu(one, other)


def _segments(model: Transformer, run: Segment) -> list[Tensor]:
    """Return the outputs of two segments, after a backward pass, and the state between them."""
    half, spec = LENGTH // 2, model.spec
    first, second = (run.part(0, half), run.part(half, LENGTH)) if spec.causal else (run, run)
    y, state = model(first.x, first.index, None, first.context)
    z, _ = model(second.x, second.index, state if spec.causal else None, second.context)
    loss, penalty = (y * z).sum(), model.penalty()
    (loss if penalty is None else loss + penalty).backward()
    model.after_update()
    return [y, z, *([] if state is None else _tensors(state))]


def _tensors(state: State) -> list[Tensor]:
    recurrent = {} if state.recurrent is None else state.recurrent.named_tensors()
    return [state.hidden, state.index.position, state.index.episode, *recurrent.values()]


def check_acting(spec: TransformerSpec) -> None:
    """Compare cached steps with the CPU."""
    run = random_segment(spec, random_index(2, LENGTH))
    expected, own = new_model(spec).double(), new_model(spec).double().to(NAME)
    for y, z in zip(_steps(own, segment_on_device(run)), _steps(expected, run), strict=True):
        assert_equal_to_cpu(y, z)


def _steps(model: Transformer, run: Segment) -> list[Tensor]:
    """Return outputs and inputs of all layers for the tokens of a segment, and for one more after a copy."""
    cache = model.cache(model.initial_state(2), LENGTH, run.context)
    places = [slice(t, t + 1) for t in range(run.length)]
    steps = [model.step(run.x[:, place.start], run.index.at(place), cache) for place in places]
    later = TokenIndex(run.index.position[:, -1:] + 1, run.index.episode[:, -1:])
    steps.append(model.step(run.x[:, 0], later, cache.copy()))
    return [part for step in steps for part in step]


def check_sparse(spec: TransformerSpec) -> None:
    """Compare block-sparse execution with the CPU."""
    with patch.multiple(plan, MIN_SPARSE_PAIRS=0, MIN_SAVING=0.0):
        check_learning(spec)


def check_head(name: str) -> None:
    """Compare the probabilities of an output head, with its search, with the CPU."""
    keys, queries, weight = (numbers(n, 6, seed=n, dtype=torch.float32) for n in (40, 5, 4))
    store = Datastore(keys, torch.arange(40) % 4, torch.arange(40) // 10)
    head = HEADS[name](k=3).build(6)
    arguments = queries, weight, torch.zeros(4)
    expected = _log_prob(head, store, *arguments)
    assert_equal_to_cpu(_log_prob(head.to(NAME), store.to(NAME), *(x.to(NAME) for x in arguments)), expected)


def _log_prob(head: Any, store: Datastore, queries: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    near = store.neighbors(queries, TorchSearch(store)(queries, 3))
    return head.log_prob(queries, near, weight, bias)


def waits(spec: TransformerSpec) -> tuple[int, float | None]:
    """Return how often the program waits in a segment pass, and on average in a step; None for an encoder.

    The segment pass includes its gradient, and its index is known on the CPU.
    """
    run = random_segment(spec, random_index(2, LENGTH))
    model, there = new_model(spec).double().to(NAME), segment_on_device(run)
    context = there.context and replace(there.context, index=run.context.index.to(NAME))
    with accelerator.waits() as count:
        model(there.x, run.index.to(NAME), None, context)[0].sum().backward()
        learning = count()
    if not spec.causal:
        return learning, None
    cache = model.cache(model.initial_state(2), LENGTH, there.context)
    with accelerator.waits() as count:
        for t in range(LENGTH):
            model.step(there.x[:, t], there.index.at(slice(t, t + 1)), cache)
        return learning, count() / LENGTH
