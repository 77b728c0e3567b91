"""Tests of early exits: exit decisions, states of exited tokens and exit losses."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    CALM,
    XL,
    DepthAdaptive,
    ExitTargets,
    Fixed,
    GRUGate,
    Performer,
    Reversible,
    RoPE,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Window,
)
from rlxf.attention.depth.calm import probability_margin
from tests.attention.passes import assert_close_for_dtype
from tests.attention.specs import new_model
from tests.attention.worlds import END, GAP, ON, index_of, numbers, random_index, random_segment

SPEC = TransformerSpec(width=8, heads=2, layers=4, feed_forward=12, position=RoPE())
DEPTHS = {
    "sequence": DepthAdaptive("sequence"),
    "multinomial": DepthAdaptive("multinomial"),
    "geometric": DepthAdaptive("geometric", "correctness"),
    "softmax": CALM("softmax", 0.5),
    "state": CALM("state", 0.9),
    "classifier": CALM("classifier", 0.5),
}
each = pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
HEAD = numbers(8, 3, seed=4)


def top_confidence(y: Tensor) -> Tensor:
    return probability_margin([(y @ HEAD).softmax(dim=-1)])


def reference_exits(model: Transformer, x: Tensor, index: TokenIndex) -> tuple[Tensor, list[int]]:
    """Run early exits token by token for one row without memory: outputs, and passes of each token."""
    inputs: list[list[Tensor]] = [[] for _ in range(model.spec.layers)]
    outputs, taken = [], []
    for t in range(x.shape[1]):
        h, history = x[0, t], []
        for n, block in enumerate(model.blocks):
            inputs[n].append(h)
            if history and exits_now(model, x[0, : t + 1], history):
                continue
            seen = torch.stack(inputs[n])[None]
            before = index.at(slice(0, t + 1))
            mask = model.attention_masks(before, before)[n]
            h = block.apply_feed_forward(block.attend(seen, None, mask))[0, -1]
            history.append(h)
        outputs.append(model.norm(h))
        taken.append(len(history))
    return torch.stack(outputs), taken


def exits_now(model: Transformer, x: Tensor, history: list[Tensor]) -> bool:
    """Return whether a token with the given states after each pass exits now."""
    depth, spec, h = model.depth, model.spec.depth, history[-1]
    if isinstance(spec, DepthAdaptive):
        if spec.classifier == "geometric":
            chi = [torch.sigmoid(s @ depth.w[n] + depth.b[n]) for n, s in enumerate(history)]
            return any(bool(c > 0.5) for c in chi)
        read = x.mean(dim=0) if spec.classifier == "sequence" else history[0]
        return len(history) > int(depth.net(read).argmax())
    if spec.confidence == "softmax":
        first, second = (model.norm(h) @ HEAD).softmax(-1).topk(2).values
        return bool(first - second >= spec.threshold)
    if spec.confidence == "state":
        if len(history) == 1:
            return False
        one, other = history[-2:]
        return bool(one @ other / (one.norm() * other.norm()) >= spec.threshold)
    return bool(torch.sigmoid(depth.net(h))[0] >= spec.threshold)


@pytest.mark.parametrize("name", [name for name in DEPTHS if name != "sequence"])  # it needs segments
@pytest.mark.parametrize("seed", range(3))
def test_steps_exit_as_in_the_reference_loop(name, seed):
    spec = replace(SPEC, depth=DEPTHS[name])
    model = new_model(spec, seed).double()
    run = random_segment(spec, TokenIndex.range(1, 9))
    cache = model.cache(model.initial_state(1), 9)
    acted = [
        model.early_step(run.x[:, t], run.index.at(slice(t, t + 1)), cache, top_confidence) for t in range(9)
    ]
    outputs, taken = reference_exits(model, run.x, run.index)
    assert_close_for_dtype(torch.cat(acted), outputs.detach())
    assert_close_for_dtype(model.pop_mean_acting_depth(), torch.tensor(sum(taken) / len(taken)))
    assert model.pop_mean_acting_depth() is None


def test_sequence_exit_uses_one_episode_only():
    """Other episodes have no effect, and single steps are rejected."""
    model = new_model(replace(SPEC, depth=DEPTHS["sequence"])).double()
    run = random_segment(model.spec, index_of([[ON, ON, END, GAP, ON, ON, ON]]))
    other = run.x.clone()
    other[:, :4] = 1e3
    lessons = []
    for x in (run.x, other):
        states = model.exits(x, run.index, output_slice=slice(4, None)).auxiliary_loss.args
        lessons.append(model.depth.log_q(*states))
    assert torch.equal(*lessons)
    with pytest.raises(ValueError, match=r"cannot run single steps; use `early_outputs`"):
        model.early_step(run.x[:, 0], run.index.at(slice(0, 1)), model.cache(model.initial_state(1), 9))


@each
def test_only_the_selected_token_of_a_segment_exits_early(depth):
    spec, depths = replace(SPEC, depth=depth), set()
    model = new_model(spec).double()
    run = random_segment(spec, TokenIndex.range(6, 5))
    with torch.no_grad():
        all_outputs = model.exits(run.x, run.index).outputs[:, :, -1]
    for row in range(6):
        here = TokenIndex(run.index.position[row : row + 1], run.index.episode[row : row + 1])
        y = model.early_outputs(
            run.x[row : row + 1], here, output_slice=slice(-1, None), confidence_fn=top_confidence
        )
        taken = int(model.pop_mean_acting_depth())
        assert_close_for_dtype(y[0, 0], all_outputs[taken - 1, row])
        depths.add(taken)
    assert depths <= {1, 2, 3, 4}
    together = model.early_outputs(
        run.x, run.index, output_slice=slice(-1, None), confidence_fn=top_confidence
    )
    assert together.shape == (6, 1, 8)


@each
def test_last_output_equals_plain_transformer(depth):
    model = new_model(replace(SPEC, depth=depth)).double()
    plain = new_model(replace(SPEC, depth=Fixed())).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("depth.")})
    run = random_segment(SPEC, random_index(2, 7))
    exits = model.exits(run.x, run.index)
    y, _ = plain(run.x, run.index)
    assert_close_for_dtype(exits.outputs[-1], y)
    assert_close_for_dtype(model(run.x, run.index)[0], y)
    assert_close_for_dtype(exits.loss_weights.sum(), torch.ones((), dtype=torch.float64))
    assert len(exits.loss_weights) == 4


def test_state_of_an_exited_token_is_copied_to_later_layers():
    spec = replace(SPEC, depth=CALM("classifier", 0.0), layers=2)
    model = new_model(spec).double()
    run, actual = random_segment(spec, TokenIndex.range(2, 5)), []
    model.blocks[1].feed_forward.register_forward_hook(lambda *_: actual.append(1))
    cache = model.cache(model.initial_state(2), 5)
    for t in range(4):
        model.early_step(run.x[:, t], run.index.at(slice(t, t + 1)), cache, top_confidence)
    assert not actual
    model.depth.threshold.fill_(2.0)
    y = model.early_step(run.x[:, 4], run.index.at(slice(4, 5)), cache, top_confidence)
    assert actual == [1]
    masks = model.attention_masks(run.index, run.index)
    lower = model.blocks[0].apply_feed_forward(model.blocks[0].attend(run.x, None, masks[0]))
    upper = model.blocks[1].apply_feed_forward(model.blocks[1].attend(lower, None, masks[1]))
    assert_close_for_dtype(y, model.norm(upper[:, -1]).detach())


@pytest.mark.parametrize(
    "other",
    [
        {"memory": XL(3), "pattern": Window(4), "residual": GRUGate()},
        {"kernel": Performer(6)},
        {"residual": Reversible()},
    ],
    ids=["memory", "sums", "reversible"],
)
@pytest.mark.parametrize("confidence", ["softmax", "state", "classifier"])
def test_unreachable_threshold_has_no_effect(other, confidence):
    spec = replace(SPEC, depth=CALM(confidence, 1.0), **other)
    model = new_model(spec).double()
    run = random_segment(spec, random_index(3, 8))
    one, two = (model.cache(model.initial_state(3), 8) for _ in range(2))
    for t in range(8):
        here, filled = run.index.at(slice(t, t + 1)), run.filled[:, t]
        y, _ = model.step(run.x[:, t], here, one)
        assert_close_for_dtype(model.early_step(run.x[:, t], here, two, top_confidence)[filled], y[filled])


def test_exit_loss_gradient_reaches_only_exit_parameters():
    for depth in (DEPTHS["sequence"], DEPTHS["multinomial"], DEPTHS["geometric"], DEPTHS["classifier"]):
        model = new_model(replace(SPEC, depth=depth)).double()
        run = random_segment(SPEC, TokenIndex.range(2, 5))
        x = run.x.requires_grad_()
        exits = model.exits(x, run.index)
        drawn = numbers(4, 2, 5)
        exits.auxiliary_loss(ExitTargets(drawn, drawn > 0, drawn > 0, run.index)).backward()
        assert x.grad is None
        touched = {name for name, p in model.named_parameters() if p.grad is not None}
        assert touched == {f"depth.{name}" for name, _ in model.depth.named_parameters()}


def test_scores_are_smoothed_within_an_episode_only():
    spec = DepthAdaptive("multinomial", penalty=0.1, sigma=2.0)
    index = TokenIndex(torch.tensor([[0, 1, 0, 0, 1]]), torch.tensor([[0, 0, -1, 1, 1]]))
    score = numbers(3, 1, 5)
    expected = []
    for t in (0, 1, 3, 4):
        value = []
        for n in range(3):
            near = [u for u in (0, 1, 3, 4) if index.episode[0, u] == index.episode[0, t]]
            apart = [int(index.position[0, t] - index.position[0, u]) for u in near]
            smooth = [math.exp(-(d**2) / 2.0) * score[n, 0, u] for d, u in zip(apart, near, strict=True)]
            value.append(float(sum(smooth)) - 0.1 * (n + 1))
        expected.append(value.index(max(value)))
    actual = spec.oracle_pass(ExitTargets(score, score > 0, score > 0, index))[0]
    assert [int(actual[t]) for t in (0, 1, 3, 4)] == expected


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("slot", [0, 2], ids=["other episode", "empty slot"])
@pytest.mark.parametrize("depth", [DEPTHS["sequence"], DEPTHS["multinomial"], DEPTHS["geometric"]], ids=str)
def test_scores_of_other_episodes_and_empty_slots_may_have_any_value(depth, slot, value):
    depth, index = replace(depth, oracle="likelihood"), index_of([[ON, END, GAP, ON, ON]])
    score = numbers(3, 1, 5)
    faulty = score.clone()
    faulty[1, 0, slot] = value
    chosen = [
        depth.oracle_pass(ExitTargets(each, each > 0, each > 0, index))[0, 3:] for each in (score, faulty)
    ]
    assert torch.equal(*chosen)


def test_token_without_likelihood_exits_elsewhere():
    """A pass that makes the target impossible is not the oracle's, also for tokens nearby."""
    score = torch.zeros(3, 1, 4)
    score[0, 0, 1] = -math.inf
    index = TokenIndex.range(1, 4)
    targets = ExitTargets(score, score > 0, score > 0, index)
    assert DepthAdaptive("multinomial", penalty=0.1, sigma=2.0).oracle_pass(targets).tolist() == [[1] * 4]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_average_skips_empty_slots_of_any_value(value):
    index = index_of([[ON, GAP, ON, END]])
    x = torch.tensor([[1.0, value, 2.0, 3.0]], requires_grad=True)
    mean = ExitTargets(x, x > 0, x > 0, index).average(x.square())
    assert mean == 14 / 3
    mean.backward()
    assert x.grad[0, [0, 2, 3]].isfinite().all()


def test_lead_of_several_choices_equals_joint_lead():
    parts = [numbers(5, size, seed=size).softmax(dim=-1) for size in (2, 3, 4)]
    joint = torch.einsum("na,nb,nc->nabc", *parts).flatten(1)
    first, second = joint.topk(2, dim=-1).values.unbind(-1)
    assert_close_for_dtype(probability_margin(parts), first - second)
    assert_close_for_dtype(
        probability_margin([torch.ones(5, 1, dtype=torch.float64)]), torch.ones(5, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: CALM("guess"), ValueError),
        (lambda: CALM(threshold=1.5), ValueError),
        (lambda: CALM(threshold="high"), TypeError),
        (lambda: DepthAdaptive("token"), ValueError),
        (lambda: DepthAdaptive(oracle="luck"), ValueError),
        (lambda: DepthAdaptive(penalty=-1.0), ValueError),
        (lambda: DepthAdaptive(sigma=0.0), ValueError),
    ],
)
def test_invalid_options_raise(make, kind):
    with pytest.raises(kind, match=r"CALM|DepthAdaptive"):
        make()


@pytest.mark.parametrize("depth", [CALM(), DepthAdaptive("multinomial")], ids=repr)
def test_early_exit_requires_two_layers(depth):
    with pytest.raises(ValueError, match=r"requires at least 2 layers, got layers=1"):
        TransformerSpec(layers=1, depth=depth)


def test_state_confidence_requires_three_layers():
    TransformerSpec(layers=3, depth=CALM("state"))
    with pytest.raises(ValueError, match=r"requires at least 3 layers, got layers=2; set layers=3"):
        TransformerSpec(layers=2, depth=CALM("state"))


@pytest.mark.parametrize("exit_coef", [0.0, 0.25, 1.0, 3.0])
@pytest.mark.parametrize("depth", [CALM(), DepthAdaptive()], ids=lambda depth: type(depth).__name__)
def test_exit_coef_scales_early_outputs(depth, exit_coef):
    shares, usual = (replace(depth, exit_coef=coef).loss_weights(4) for coef in (exit_coef, 1.0))
    assert_close_for_dtype(shares.sum(), torch.ones((), dtype=torch.float64))
    assert_close_for_dtype(shares[:-1] / shares[-1], exit_coef * usual[:-1] / usual[-1])
