"""Tests of masked pre-training: random masking, loss, gradients, training and checkpoints."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy.stats import binom

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl import gtrxl
from rlxf.agents.offline.context_window import TOKENS_PER_STEP
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.agents.token_masking import KINDS, MaskedWindows, Masking
from rlxf.attention import CALM, ALiBi, TransformerSpec, Window
from rlxf.data import WindowBatch
from rlxf.training import CheckpointError, CheckpointFolder, CheckpointWriter, read_archive, write_archive
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    OBSERVATIONS,
    SIZES,
    TINY,
    VECTOR,
    small_agent,
    small_pretraining,
    some_trajectories,
    some_windows,
)
from tests.attention.oracle import close

STEPS = 200_000


def real_and_padding() -> torch.Tensor:
    """Return a mask of 4 rows of steps in which every seventh is padding."""
    return torch.arange(STEPS).view(4, -1) % 7 != 0


def drawn(share=0.15, seed=0) -> Masking:
    return Masking.draw(real_and_padding(), share, torch.Generator().manual_seed(seed))


def within_bounds(count, number, probability):
    """Return whether a count is within the binomial interval of probability 1 - 1e-6."""
    low, high = binom.interval(1 - 1e-6, number, probability)
    return low <= count <= high


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("kind", range(TOKENS_PER_STEP))
def test_the_fraction_of_chosen_tokens_of_each_kind(share, kind):
    chosen = drawn(share).chosen[..., kind].sum().item()
    assert within_bounds(chosen, int(real_and_padding().sum()), share)


def test_80_percent_are_masked_10_swapped_and_10_unchanged():
    masking = drawn()
    chosen = int(masking.chosen.sum())
    unchanged = masking.chosen & ~masking.masked & ~masking.swapped
    for mask, fraction in ((masking.masked, 0.8), (masking.swapped, 0.1), (unchanged, 0.1)):
        assert within_bounds(int(mask.sum()), chosen, fraction)


def test_padding_is_neither_chosen_nor_a_replacement():
    masking, real = drawn(1.0), real_and_padding()
    assert (masking.chosen == real[..., None]).all()
    assert real.flatten()[masking.replacement_step].all()


def test_only_chosen_tokens_are_replaced_and_only_once():
    masking = drawn()
    assert not (masking.masked & masking.swapped).any()
    assert not ((masking.masked | masking.swapped) & ~masking.chosen).any()


def test_replacements_come_from_the_whole_batch():
    other = drawn().replacement_step
    counts = torch.bincount(other.flatten() // (STEPS // 4), minlength=4)
    assert all(within_bounds(count, other.numel(), 1 / 4) for count in counts.tolist())


def test_equal_generators_give_equal_masks():
    first, again, different = drawn(), drawn(), drawn(seed=1)
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(different, name)), name


@pytest.mark.parametrize("kinds", [("action",), ("return", "state"), KINDS])
def test_masking_of_some_kinds_is_that_of_all_kinds_at_their_tokens(kinds):
    whole, part = drawn(), drawn().only(kinds)
    for name in ("chosen", "masked", "swapped"):
        for number, kind in enumerate(KINDS):
            tokens, expected = getattr(part, name)[..., number], getattr(whole, name)[..., number]
            assert torch.equal(tokens, expected & (kind in kinds)), (name, kind)
    assert torch.equal(part.replacement_step, whole.replacement_step)


def test_hide_equals_a_loop():
    generator = torch.Generator().manual_seed(1)
    contents, masks = torch.randn(2, 6, TOKENS_PER_STEP, 4), torch.randn(TOKENS_PER_STEP, 4)
    masking = Masking.draw(torch.ones(2, 6, dtype=torch.bool), 1.0, generator)
    assert masking.masked.any()
    assert masking.swapped.any()
    hidden = masking.hide(contents, masks)
    for place in torch.cartesian_prod(*map(torch.arange, (2, 6, TOKENS_PER_STEP))).tolist():
        row, step, kind = place
        expected = contents[row, step, kind]
        if masking.masked[row, step, kind]:
            expected = masks[kind]
        if masking.swapped[row, step, kind]:
            other_row, other_step = divmod(int(masking.replacement_step[row, step, kind]), 6)
            expected = contents[other_row, other_step, kind]
        assert torch.equal(hidden[row, step, kind], expected), place


CHOICES = spaces.MultiDiscrete([2, 3])


def weights(pretraining):
    return [parameter.detach().clone() for parameter in pretraining.policy.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


def error_of(model, y, windows, row, step, kind):
    """Return the error of output y (C,) for a single token."""
    if kind == 0:
        return (model.return_head(y) - windows.return_to_go[row, step] / model.tokens.return_scale).square()
    if kind == 1:
        normalized = model.features.normalization(windows.observations[row, step])
        return (model.state_head(y) - normalized).square().mean()
    action, head = windows.actions[row, step], model.action_head
    if torch.is_floating_point(action):
        return (head.net(y).tanh() - head.actions(action)).square().mean()
    parts = zip(head.net(y).split(head.actions.sizes), action, strict=True)
    return -sum(logits.log_softmax(-1)[choice] for logits, choice in parts)


@pytest.mark.parametrize("actions", [ACTIONS["Box"], CHOICES], ids=["numbers", "choices"])
def test_the_loss_is_the_mean_error_of_the_chosen_tokens(actions):
    pretraining = small_pretraining(some_trajectories(VECTOR, actions))
    model, batch = pretraining.policy.eval(), some_windows(pretraining)
    y = model.outputs(model.steps(batch.windows), batch.masking).unflatten(1, (-1, 3))
    places = batch.masking.chosen.nonzero().tolist()
    errors = [error_of(model, y[tuple(p)], batch.windows, *p).view(()) for p in places]
    parts = model.losses(batch)
    close(parts["loss"], torch.stack(errors).mean(), 1e-5)
    for number, kind in enumerate(("return", "state", "action")):
        own = [error for error, place in zip(errors, places, strict=True) if place[2] == number]
        close(parts[f"{kind}_loss"], torch.stack(own).mean(), 1e-5)


@pytest.mark.parametrize("kinds", [("action",), ("return",), ("state",), ("return", "action")])
def test_only_predicted_kinds_are_masked_and_enter_the_loss(kinds):
    pretraining = small_pretraining(predicted_tokens=kinds, mask_probability=0.5)
    batch = pretraining._batch(pretraining.windows(pretraining.trajectories))
    others = [number for number, kind in enumerate(KINDS) if kind not in kinds]
    assert batch.masking.masked.any()
    assert not batch.masking.chosen[..., others].any()
    model = pretraining.policy.eval()
    y = model.outputs(model.steps(batch.windows), batch.masking).unflatten(1, (-1, 3))
    errors = [
        error_of(model, y[tuple(place)], batch.windows, *place).view(())
        for place in batch.masking.chosen.nonzero().tolist()
    ]
    parts = model.losses(batch)
    close(parts["loss"], torch.stack(errors).mean(), 1e-5)
    assert parts.keys() == {"loss", *(f"{kind}_loss" for kind in kinds)}


def test_actions_are_predicted_by_default():
    data = some_trajectories()
    pretraining = MaskedPretraining(data, 4, core=TINY, device="cpu")
    assert pretraining.predicted_tokens == ("action",)
    names = {name.split(".")[0] for name, _ in pretraining.policy.named_parameters()}
    assert {name for name in names if name.endswith("_head")} == {"action_head"}


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        ("action", TypeError, r"sequence of strings such as \('action',\), got 'action'"),
        (None, TypeError, "got None"),
        ((), ValueError, r"one or more of return, state, action, got \(\)"),
        (("action", "reward"), ValueError, "got .*'reward'"),
        ([["action"]], ValueError, "one or more of return, state, action"),
    ],
)
def test_unknown_kinds_of_predicted_tokens_are_refused(kinds, error, message):
    with pytest.raises(error, match=message):
        small_pretraining(predicted_tokens=kinds)


def test_kinds_of_predicted_tokens_are_sorted_and_not_repeated():
    assert small_pretraining(predicted_tokens=["action", "return", "action"]).predicted_tokens == (
        "return",
        "action",
    )


def test_predicted_tokens_are_stored_and_cannot_be_replaced(tmp_path):
    small_pretraining().save(tmp_path / "all")
    assert MaskedPretraining.load(tmp_path / "all", device="cpu").predicted_tokens == KINDS
    with pytest.raises(CheckpointError, match="saved with predicted_tokens="):
        MaskedPretraining.load(tmp_path / "all", predicted_tokens=("action",), device="cpu")


@pytest.mark.parametrize("stored", [[], ["reward"], ["action", "return"], ["action", "action"], "action", {}])
def test_files_with_other_predicted_tokens_are_refused(tmp_path, stored):
    small_pretraining(predicted_tokens=("action",)).save(tmp_path / "own")
    archive = read_archive(tmp_path / "own.zip")
    assert archive.documents["agent"]["settings"]["predicted_tokens"] == ["action"]
    archive.documents["agent"]["settings"]["predicted_tokens"] = stored
    write_archive(tmp_path / "other.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="predicted_tokens"):
        MaskedPretraining.load(tmp_path / "other", device="cpu")


def test_the_loss_weights_the_exits_of_all_layers():
    core = TransformerSpec(**SIZES | {"layers": 3}, depth=CALM())
    pretraining = small_pretraining(core=core)
    model, batch = pretraining.policy.eval(), some_windows(pretraining)
    outputs = model.exits(model.steps(batch.windows), batch.masking).outputs.unflatten(2, (-1, 3))
    places = batch.masking.chosen.nonzero().tolist()
    errors = [[error_of(model, y[tuple(p)], batch.windows, *p).view(()) for p in places] for y in outputs]
    means = torch.stack([torch.stack(each).mean() for each in errors]).detach()
    close(model.losses(batch)["loss"], means @ torch.tensor([1 / 6, 2 / 6, 3 / 6]), 1e-5)
    assert len(set(means.tolist())) == 3


def changed(batch: MaskedWindows, **parts) -> MaskedWindows:
    return MaskedWindows(WindowBatch(**(vars(batch.windows) | parts)), batch.masking)


def test_padding_does_not_enter_the_loss():
    pretraining = small_pretraining()
    model, batch = pretraining.policy.eval(), some_windows(pretraining)
    padding, windows = ~batch.windows.mask, batch.windows
    values = {
        name: getattr(windows, name).masked_fill(padding.view(*padding.shape, *[1] * extra), 1e3)
        for name, extra in (("observations", 1), ("actions", 1), ("return_to_go", 0))
    }
    close(model.losses(changed(batch, **values))["loss"], model.losses(batch)["loss"], 1e-6)


def test_masked_tokens_do_not_affect_outputs():
    pretraining = small_pretraining()
    model, batch = pretraining.policy.eval(), some_windows(pretraining)
    windows, masked = batch.windows, batch.masking.masked
    model_steps = model.steps(windows)
    others = batch.masking.replacement_step[batch.masking.swapped]
    hidden = masked[..., 0].clone()
    hidden.view(-1)[others] = False  # tokens that replace others stay visible
    assert hidden.any()
    returns = torch.where(hidden, windows.return_to_go + 100, windows.return_to_go)
    changed_steps = model.steps(changed(batch, return_to_go=returns).windows)
    assert torch.equal(model.outputs(model_steps, batch.masking), model.outputs(changed_steps, batch.masking))
    assert not torch.equal(model.outputs(model_steps), model.outputs(changed_steps))


def test_attention_is_bidirectional():
    pretraining = small_pretraining()
    model, batch = pretraining.policy.eval(), some_windows(pretraining)
    later = batch.windows.return_to_go.clone()
    later[:, -1] += 100
    before, after = (
        model.outputs(model.steps(each.windows)) for each in (batch, changed(batch, return_to_go=later))
    )
    whole = batch.windows.mask.all(dim=1)
    assert ((before - after)[whole, 0].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("kinds", [KINDS, ("action",)])
def test_every_weight_gets_a_gradient(kinds):
    pretraining = small_pretraining(predicted_tokens=kinds)
    batch = some_windows(pretraining)
    pretraining.policy.losses(MaskedWindows(batch.windows, batch.masking.only(kinds)))["loss"].backward()
    for name, parameter in pretraining.policy.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_all_spaces_can_be_trained(observations, actions):
    data = some_trajectories(OBSERVATIONS[observations], ACTIONS[actions])
    pretraining = small_pretraining(data)
    before = weights(pretraining)
    pretraining.learn(1)
    after = weights(pretraining)
    assert all(torch.isfinite(each).all() for each in after)
    assert not same(before, after)


@pytest.mark.parametrize(
    "core",
    [gtrxl(6, width=16, heads=2), TransformerSpec(**SIZES, position=ALiBi(), pattern=Window(4))],
    ids=["gtrxl", "window"],
)
def test_cores_of_agents_become_bidirectional_without_memory(core):
    pretraining = small_pretraining(core=core)
    assert (pretraining.core.causal, pretraining.core.memory) == (False, None)
    pretraining.learn(2)


@pytest.mark.parametrize("name", ["Gated DeltaNet", "Mamba-2 below attention"])
@pytest.mark.parametrize("kinds", [KINDS, ("action",)])
def test_recurrent_cores_are_pretrained_causally_and_transferred(name, kinds):
    pretraining = small_pretraining(core=CORES[name], predicted_tokens=kinds)
    assert (pretraining.core.causal, pretraining.core.memory) == (True, None)
    before = weights(pretraining)
    pretraining.learn(2)
    assert not same(before, weights(pretraining))
    agent = small_agent(core=CORES[name]).load_pretrained(pretraining)
    mixers = [each.policy.transformer.blocks[0].mixer.state_dict() for each in (pretraining, agent)]
    assert all(torch.equal(mixers[0][key], mixers[1][key]) for key in mixers[0])


@pytest.mark.parametrize("name", ["attention sinks", "memory tokens", "retention valve"])
def test_cores_with_memory_are_pretrained_without_it_and_keep_their_own_memory_tokens(name):
    pretraining = small_pretraining(core=CORES[name])
    assert (pretraining.core.causal, pretraining.core.memory) == (False, None)
    pretraining.learn(2)
    agent = small_agent(core=CORES[name])
    own = {key: x.clone() for key, x in agent.policy.transformer.state_dict().items()}
    after = agent.load_pretrained(pretraining).policy.transformer.state_dict()
    given = pretraining.policy.transformer.state_dict()
    assert all(torch.equal(x, given.get(key, own[key])) for key, x in after.items())
    assert {key.split(".")[0] for key in after.keys() - given.keys()} <= {"memory_tokens"}
    agent.learn(2)


def predictable():
    """Return episodes in which returns, observations and actions determine each other."""
    sign = np.repeat(np.arange(40) % 2 * 2 - 1, 6).astype(np.float32)
    changes = {
        "observations": np.stack([sign, -sign, sign], axis=1),
        "actions": np.stack([sign / 2 + 0.5, 5 + 4 * sign], axis=1),
        "return_to_go": sign,
        "observation_mean": np.zeros(3, np.float32),
        "observation_std": np.ones(3, np.float32),
    }
    return some_trajectories(lengths=(6,) * 40, **changes)


def test_training_reduces_the_loss_of_predictable_tokens():
    pretraining = MaskedPretraining(
        predictable(), 4, core=TINY, learning_rate=1e-2, batch_size=32, seed=0, device="cpu"
    )
    batch = some_windows(pretraining, share=0.15, seed=5)
    before = pretraining.policy.losses(batch)["loss"].item()
    pretraining.learn(150)
    assert pretraining.policy.eval().losses(batch)["loss"].item() < 0.3 * before


def test_equal_seeds_give_bitwise_equal_weights():
    core = decision_transformer(width=16, layers=2, heads=2, dropout=0.2)
    first, again, other = (weights(small_pretraining(seed=seed, core=core).learn(3)) for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


def test_training_continues_bitwise_equal_after_loading(tmp_path):
    uninterrupted = small_pretraining(warmup_updates=2, mask_probability=0.3).learn(3)
    uninterrupted.learn(3, reset_num_timesteps=False)
    small_pretraining(warmup_updates=2, mask_probability=0.3).learn(3).save(tmp_path / "half")
    resumed = MaskedPretraining.load(tmp_path / "half", uninterrupted.trajectories, device="cpu")
    assert (resumed.mask_probability, resumed.core, resumed.num_timesteps) == (0.3, uninterrupted.core, 3)
    resumed.learn(3, reset_num_timesteps=False)
    assert same(weights(uninterrupted), weights(resumed))


def test_resumed_training_is_bitwise_equal_for_equal_settings(tmp_path):
    core = decision_transformer(width=16, layers=2, heads=2, dropout=0.2)
    folder = CheckpointFolder(tmp_path)
    uninterrupted = small_pretraining(core=core).learn(6, CheckpointWriter(folder, every_seconds=0))
    for file in folder.files()[1:]:
        file.unlink()
    torch.manual_seed(99)  # a new process has other generator states
    resumed = small_pretraining(core=core).learn(6, resume_from=tmp_path)
    assert same(weights(uninterrupted), weights(resumed))
    with pytest.raises(ValueError, match=r"its mask_probability is 0\.15, the agent's 0\.3"):
        small_pretraining(core=core, mask_probability=0.3).learn(6, resume_from=tmp_path)


def test_a_file_of_another_algorithm_is_refused(tmp_path):
    small_pretraining().save(tmp_path / "pretraining")
    with pytest.raises(CheckpointError, match="no DecisionTransformer"):
        DecisionTransformer.load(tmp_path / "pretraining")


def test_predict_is_refused():
    with pytest.raises(TypeError, match="cannot act"):
        small_pretraining().predict({})


@pytest.mark.parametrize("mask_probability", [0, -0.1, 1.1, float("nan")])
def test_chosen_out_of_range_is_refused(mask_probability):
    with pytest.raises(ValueError, match=r"mask_probability must be .* more than 0 and at most 1, got"):
        small_pretraining(mask_probability=mask_probability)


def test_a_core_with_cross_attention_is_refused():
    with pytest.raises(ValueError, match="cross_attention=False"):
        small_pretraining(core=TransformerSpec(**SIZES, cross_attention=True))
