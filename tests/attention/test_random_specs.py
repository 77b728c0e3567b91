"""Random combinations over all axes give a working transformer, or an error that names two choices."""

import random
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlxf.attention import Transformer, TransformerSpec
from rlxf.attention.registry import TECHNIQUES
from rlxf.attention.technique import Technique
from rlxf.attention.token_index import EMPTY
from tests.attention.passes import act, assert_close_for_dtype
from tests.attention.specs import ALONE, DEFAULT, LINFORMER, OF_ATTENTION, RECIPES, SHORT, new_model
from tests.attention.test_pairs import REMEDY
from tests.attention.worlds import END, GAP, ON, RESET, Segment, index_of, numbers, random_segment

CHUNKS, SPECS_PER_CHUNK = 25, 20
DEFAULT_CHUNKS = 3
"""Chunks that run without ``--thorough``."""
LEAST_ACCEPTED = 0.4
"""Least share of accepted specs: a refusal of all combinations would pass the other checks."""

TRIES = 100
"""Draws of random changes of a spec, until one is accepted."""
LEAST_CHECKED = 500
"""Least number of accepted specs with more than one random choice."""

RUN = index_of([[ON, ON, END, ON, GAP, ON, ON, ON, ON, ON], [RESET, ON, ON, ON, ON, END, ON, ON, ON, RESET]])
"""Rows of two episodes, with empty slots inside and around them."""
LENGTHS = [4, 1, 5]

FIELDS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (1, 2),
    "qk_norm": ("rms", "l2", "rms_all_heads"),
    "attention_gate": ("headwise", "elementwise"),
    "feed_forward_chunk": (2,),
    "norm": ("post",),
    "norm_type": ("rms_norm",),
    "final_norm": (False,),
    "activation": ("swiglu", "gelu"),
    "cross_attention": (True,),
    "causal": (False,),
}
"""Values of the fields without techniques that differ from the default."""
RARE = ("cross_attention", "causal")


def techniques(axis: str) -> list[Any]:
    """Return the techniques of an axis with the settings of the contract tests; without the default."""
    own = [SHORT.get(name) or technique() for name, technique in TECHNIQUES[axis].items()]
    own += [getattr(spec, axis) for spec in RECIPES.values()]
    return [each for each in dict.fromkeys(own) if each != getattr(DEFAULT, axis)]


CHOICES = {axis: techniques(axis) for axis in TECHNIQUES} | {name: list(FIELDS[name]) for name in FIELDS}


def draw(seed: int) -> dict[str, Any]:
    """Draw the fields of a spec: each keeps its default with a probability of about a half."""
    rng = random.Random(seed)
    mixed, rate = rng.choice(("attention", "recurrent", "mixed")), rng.choice((0.15, 0.4))
    layers, names = rng.choice((2, 3)), list(CHOICES)
    chosen = {"layers": layers, "heads": rng.choice((1, 2, 4))}
    for name in names:
        if rng.random() < (0.05 if name in RARE else rate):
            chosen[name] = rng.choice(CHOICES[name])
    chosen.pop("recurrence", None)
    if mixed != "attention":
        chosen["recurrence"] = rng.choice(CHOICES["recurrence"])
    if mixed == "mixed":
        chosen["attention_layers"] = tuple(sorted(rng.sample(range(layers), rng.randint(1, layers - 1))))
    if mixed == "recurrent" and rng.random() < 0.8:
        chosen = {name: value for name, value in chosen.items() if name not in OF_ATTENTION}
    if not chosen.get("causal", True) and "Linformer" in repr(chosen.get("kernel")):
        chosen["kernel"] = LINFORMER
    return chosen


def extended(name: str) -> dict[str, Any]:
    """Return the fields of a spec of the contract tests, with other fields changed at random."""
    base, rng = (ALONE | RECIPES)[name], random.Random(name)
    own = {
        field.name: getattr(base, field.name)
        for field in fields(TransformerSpec)
        if getattr(base, field.name) != getattr(DEFAULT, field.name)
    }
    others = [name for name in CHOICES if name not in own]
    for _ in range(TRIES):
        chosen = {name: rng.choice(CHOICES[name]) for name in rng.sample(others, rng.randint(1, 3))} | own
        if refusal(chosen) is None:
            return chosen
    raise AssertionError(f"no random change of {name} was accepted")


def refusal(chosen: dict[str, Any]) -> str | None:
    """Return the error message for the fields of a spec; None if they are compatible."""
    try:
        replace(DEFAULT, **chosen)
    except ValueError as error:
        return str(error)
    return None


def named(chosen: dict[str, Any], message: str) -> set[str]:
    """Return the fields of a refused spec that its message names, by their names or their techniques."""
    spec = {field.name: getattr(DEFAULT, field.name) for field in fields(TransformerSpec)} | chosen
    texts = {name: [repr(part) for part in parts(spec[name])] for name in TECHNIQUES}
    return {
        name
        for name in spec
        if re.search(rf"\b{name}\b", message) or any(text in message for text in texts.get(name, ()))
    }


def parts(technique: Any) -> list[Any]:
    """Return a technique and the techniques that it combines."""
    if not isinstance(technique, Technique):
        return []
    own = [getattr(technique, field.name) for field in fields(technique)]  # type: ignore[arg-type]
    inner = [part for value in own for part in (value if isinstance(value, tuple) else [value])]
    return [technique, *(each for part in inner for each in parts(part))]


def cases(always: Iterable[Any], thorough: Iterable[Any]) -> list[Any]:
    """Return the cases of a test; the second ones run only with ``--thorough``."""
    return [*always, *(pytest.param(one, marks=pytest.mark.thorough) for one in thorough)]


@pytest.mark.parametrize("chunk", cases(range(DEFAULT_CHUNKS), range(DEFAULT_CHUNKS, CHUNKS)))
def test_random_specs_work_or_are_refused(chunk):
    accepted = 0
    for seed in range(chunk * SPECS_PER_CHUNK, (chunk + 1) * SPECS_PER_CHUNK):
        accepted += check(draw(seed))
    assert accepted >= LEAST_ACCEPTED * SPECS_PER_CHUNK / 2, "accepted specs of a chunk"


@pytest.mark.parametrize("name", cases(ALONE, RECIPES))
def test_each_technique_works_with_random_changes_of_other_choices(name):
    assert check(extended(name))


def test_many_random_specs_are_accepted():
    """Draws from all axes are often accepted, and each technique is checked in a random combination."""
    draws = [draw(seed) for seed in range(CHUNKS * SPECS_PER_CHUNK)]
    accepted = [chosen for chosen in draws if refusal(chosen) is None]
    assert len(accepted) >= LEAST_ACCEPTED * len(draws)
    accepted += [extended(name) for name in [*ALONE, *RECIPES]]
    assert len(accepted) >= LEAST_CHECKED
    for axis in TECHNIQUES:
        used = {type(part) for chosen in accepted for part in parts(chosen.get(axis, getattr(DEFAULT, axis)))}
        assert set(TECHNIQUES[axis].values()) <= used, axis


def check(chosen: dict[str, Any]) -> bool:
    """Check the contracts of a spec, or its refusal; return whether it is accepted."""
    message = refusal(chosen)
    if message is not None:
        assert "\n" not in message
        assert REMEDY.search(message), message
        assert len(named(chosen, message)) >= 2, (chosen, message)
        return False
    spec = replace(DEFAULT, **chosen)
    assert TransformerSpec.from_json(spec.to_json()) == spec
    model = new_model(spec).double()
    run = random_segment(spec, RUN)
    outputs = check_acting(model, run) if spec.causal else output(model, run)
    check_isolation(model, run, outputs)
    if spec.causal:
        check_causality(model, run, outputs)
    check_gradients(model, run)
    return True


def output(model: Transformer, run: Segment) -> Tensor:
    """Return the outputs of all tokens, (B, T, C), in segments."""
    state, parts = None, []
    for segment in run.cut(LENGTHS if model.spec.causal else [run.length]):
        y, state = model(segment.x, segment.index, state, segment.context)
        parts.append(y)
    return torch.cat(parts, dim=1)


def check_acting(model: Transformer, run: Segment) -> Tensor:
    """Check that steps equal segments, from the state before each segment, and return the outputs."""
    state, parts = None, []
    for segment in run.cut(LENGTHS):
        before = model.initial_state(len(segment.x)) if state is None else state
        y, state = model(segment.x, segment.index, state, segment.context)
        cache = model.cache(before, before.index.shape[1] + segment.length, segment.context)
        acted, _ = act(model, segment, cache)
        assert_close_for_dtype(acted[segment.filled], y[segment.filled].detach())
        parts.append(y)
    return torch.cat(parts, dim=1)


def hidden_slots(run: Segment) -> Tensor:
    """Return a mask (B, T) of even episodes and of empty slots, which must not affect odd episodes."""
    return (run.index.episode % 2 == 0) | (run.index.episode == EMPTY)


def check_isolation(model: Transformer, run: Segment, outputs: Tensor) -> None:
    """Check that tokens of even episodes and of empty slots do not affect odd episodes."""
    hidden = hidden_slots(run)
    other = torch.where(hidden[..., None], 1e3 * numbers(*run.x.shape, seed=4), run.x)
    changed = output(model, run.with_tokens(other))
    assert torch.equal(changed[~hidden], outputs[~hidden])


def check_causality(model: Transformer, run: Segment, outputs: Tensor) -> None:
    """Check that no token affects earlier outputs, and that it affects its own."""
    for time in (3, 7):
        other = run.x.clone()
        other[:, time] += numbers(len(run.x), run.x.shape[-1], seed=3)
        changed, early = output(model, run.with_tokens(other)), run.filled[:, :time]
        assert_close_for_dtype(changed[:, :time][early], outputs[:, :time][early])
        assert ((changed - outputs)[:, time].abs().amax(-1) > 1e-9)[run.filled[:, time]].all()


def check_gradients(model: Transformer, run: Segment) -> None:
    """Check that all gradients are finite, and 0 for tokens of other episodes."""
    x = run.x.clone().requires_grad_()
    exits = model.exits(x, run.index, None, run.context)
    odd = ~hidden_slots(run)
    gradient = torch.autograd.grad(exits.outputs[-1][odd].square().sum(), x, retain_graph=True)[0]
    assert not gradient[run.filled & ~odd].any()
    penalty = model.penalty()
    loss = (exits.outputs[:, run.filled] * numbers(*exits.outputs[:, run.filled].shape, seed=1)).sum()
    (loss if penalty is None else loss + penalty).backward()
    gradients = [x.grad, *(weight.grad for weight in model.parameters())]
    assert all(one is None or one.isfinite().all() for one in gradients)
    assert sum(one is not None for one in gradients) > len(gradients) / 2
