"""Callbacks for TensorBoard: their schedule, memory metrics, histograms and attention maps."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from rlxf.agents.common.parameter_groups import parameter_groups
from rlxf.agents.gtrxl.callbacks import (
    HISTOGRAM_VALUES,
    AttentionMapCallback,
    HistogramCallback,
    MemoryCallback,
    RolloutCallback,
    attention_figure,
    last_segments,
    mean_attention_distance,
    memory_attention_fraction,
    segment_mask,
    subsample,
)
from rlxf.attention import Add, LearnedAbsolute, Softmax, TokenIndex, Window
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.inspection import attention_weights
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    GOES_ON,
    IMAGE,
    next_step_scripts,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)

N_STEPS, N_ENVS = 16, 3
ROLLOUT = N_STEPS * N_ENVS
EVERYTHING = {"histograms": 0, "images": 0, "scalars": 0}


def logging_agent(folder: Path, formats: tuple[str, ...] = ("tensorboard",), **changes: Any) -> GTrXLPPO:
    """Return a small agent that logs to a folder."""
    agent = small_agent(changes.pop("env", None) or scripts(shifted(N_ENVS)), **changes)
    agent.set_logger(configure(str(folder), list(formats)))
    return agent


def events(folder: Path) -> EventAccumulator:
    """Load all logged events."""
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


SHORT_ROLLOUT = 4 * 2


def fast_agent():
    return small_agent(scripts(shifted(2)), n_steps=4, batch_size=4, n_epochs=1)


class RolloutRecorder(RolloutCallback):
    """Record the rollouts at which the callback runs."""

    def __init__(self, every_rollouts: int):
        super().__init__(every_rollouts)
        self.steps: list[int] = []

    def record(self) -> None:
        self.steps.append(self.num_timesteps // SHORT_ROLLOUT)


@pytest.mark.parametrize(("every", "rollouts"), [(3, [1, 4, 7, 8]), (1, [*range(1, 9)]), (100, [1, 8])])
def test_callback_runs_at_first_every_nth_and_last_rollout(every, rollouts):
    callback = RolloutRecorder(every)
    fast_agent().learn(8 * SHORT_ROLLOUT, callback)
    assert callback.steps == rollouts


def test_second_training_continues_count():
    callback, agent = RolloutRecorder(3), fast_agent()
    agent.learn(2 * SHORT_ROLLOUT, callback)
    agent.learn(4 * SHORT_ROLLOUT, callback, reset_num_timesteps=False)
    assert callback.steps == [1, 2, 4, 6]


@pytest.mark.parametrize("callback", [AttentionMapCallback, HistogramCallback, MemoryCallback])
def test_every_rollouts_below_one_is_rejected(callback):
    with pytest.raises(ValueError, match="every_rollouts must be at least 1, got 0"):
        callback(every_rollouts=0)
    with pytest.raises(ValueError, match=r"every_rollouts must be a whole number, got 1\.5"):
        callback(every_rollouts=1.5)


@pytest.mark.parametrize("callback", [AttentionMapCallback, HistogramCallback, MemoryCallback])
def test_other_agent_is_rejected_before_training(callback):
    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(TypeError, match=f"{callback.__name__} needs a GTrXLPPO agent, got PPO"):
        agent.learn(8, callback())
    assert agent.num_timesteps == 0


def test_last_segments_reproduce_values_of_rollout():
    agent = small_agent(scripts(shifted(3)))
    for buffer in rollouts(agent, 2):
        transformer, *segments = last_segments(agent.policy, buffer, environments=2)
        y, _ = transformer.encode(*segments)
        values = agent.policy.heads(y.flatten(0, 1))[1].view(2, -1)
        torch.testing.assert_close(values, buffer.values[:2, -buffer.segment_length :], rtol=1e-4, atol=1e-5)


def test_number_of_environments_is_limited():
    agent = small_agent(scripts(shifted(3)))
    (buffer,) = rollouts(agent, 1)
    _, _, index, _ = last_segments(agent.policy, buffer, environments=99)
    assert index.shape == (3, buffer.segment_length)


def test_weights_are_positive_exactly_where_allowed():
    agent = small_agent(next_step_scripts(shifted(3)))
    *_, buffer = rollouts(agent, 2)
    segments = last_segments(agent.policy, buffer, environments=3)
    allowed = segment_mask(segments).allowed
    for weights in attention_weights(*segments):
        assert ((weights > 0) == allowed[:, None]).all()
        torch.testing.assert_close(
            weights.sum(-1), allowed.any(-1)[:, None].float().expand(weights.shape[:3])
        )


ATTENTION_TAGS = {
    f"memory/layer_{n}/{name}" for n in (1, 2) for name in ("attention_on_memory", "attended_distance")
}
GATE_TAGS = {f"memory/layer_{n}/{name}_gate" for n in (1, 2) for name in ("attention", "feed_forward")}


def by_hand(weights, distance, memory) -> tuple[float, float]:
    total = on_memory = back = 0.0
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, weights.shape)).tolist():
        weight = float(weights[b, h, i, j])
        total += weight
        on_memory += weight * (j < memory)
        back += weight * int(distance[b, i, j])
    return on_memory / total, back / total


@pytest.mark.parametrize("total", [1.0, 0.4], ids=["softmax", "softmax1"])
def test_share_and_distance_are_means_over_attention(total):
    generator = torch.Generator().manual_seed(0)
    weights = total * torch.rand(2, 3, 4, 9, generator=generator, dtype=torch.float64).softmax(-1)
    weights[0, :, 1] = 0.0  # a reset step
    distance = torch.arange(4)[:, None] + 5 - torch.arange(9)
    actual = memory_attention_fraction(weights), mean_attention_distance(weights, distance.expand(2, 4, 9))
    assert actual == pytest.approx(by_hand(weights, distance.expand(2, 4, 9), memory=5))


def test_metrics_of_each_layer_are_logged(tmp_path):
    endless = scripts([[GOES_ON] * 100] * 3)
    agent = logging_agent(tmp_path, env=endless)
    agent.learn(3 * ROLLOUT, MemoryCallback(every_rollouts=1))
    log = events(tmp_path)
    assert set(log.Tags()["scalars"]) >= ATTENTION_TAGS | GATE_TAGS | {"memory/filled"}
    for tag in ATTENTION_TAGS | GATE_TAGS:
        values = [event.value for event in log.Scalars(tag)]
        assert [event.step for event in log.Scalars(tag)] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
        reach = agent.core.memory.length if "distance" in tag else 1
        assert all(0 < value < reach for value in values)


def test_one_step_episodes_have_no_attention_on_memory(tmp_path):
    agent = logging_agent(tmp_path, env=scripts([[1]] * 3))
    agent.learn(ROLLOUT, MemoryCallback())
    log = events(tmp_path)
    for tag in ATTENTION_TAGS:
        assert log.Scalars(tag)[0].value == 0


@pytest.mark.parametrize(
    "core",
    [small_core(residual=Add()), replace(small_core(residual=Add()), kernel=Softmax(softmax1=True))],
    ids=["ungated", "softmax1"],
)
def test_no_gate_metrics_without_gru_gates(tmp_path, core):
    agent = logging_agent(tmp_path, core=core)
    agent.learn(ROLLOUT, MemoryCallback())
    actual = set(events(tmp_path).Tags()["scalars"])
    assert actual >= ATTENTION_TAGS
    assert not actual & GATE_TAGS


def test_metrics_are_in_other_log_formats(tmp_path):
    logging_agent(tmp_path, formats=("csv",)).learn(ROLLOUT, MemoryCallback())
    assert (
        set((tmp_path / "progress.csv").read_text().splitlines()[0].split(",")) >= ATTENTION_TAGS | GATE_TAGS
    )


LAYER_GROUPS = {"attention", "feed_forward", "norms"}
GATE_GROUPS = {"attention_gate", "feed_forward_gate"}
OTHER_GROUPS = {"token", "final_norm", "action_head", "value_head"}


def in_both_layers(*groups: str) -> set[str]:
    return {f"layer_{n}/{group}" for n in (1, 2) for group in groups}


def groups_of(**changes) -> dict:
    spaces = changes.pop("spaces", ())
    return parameter_groups(small_agent(scripts(shifted(3), *spaces), **changes).policy)


def test_a_gated_agent():
    assert set(groups_of()) == OTHER_GROUPS | in_both_layers(*LAYER_GROUPS, *GATE_GROUPS)


def test_an_agent_without_gates():
    assert set(groups_of(core=small_core(residual=Add()))) == OTHER_GROUPS | in_both_layers(*LAYER_GROUPS)


def test_groups_of_optional_modules():
    core = replace(small_core(), position=LearnedAbsolute(64))
    spaces = (IMAGE, ACTIONS["Box"])
    groups = groups_of(core=core, spaces=spaces, policy="CnnGTrXLPolicy", reconstruction_coef=0.1)
    more = {"features", "position_embedding", "log_std", "reconstruction_head"}
    assert set(groups) == OTHER_GROUPS | in_both_layers(*LAYER_GROUPS, *GATE_GROUPS) | more


def test_groups_partition_the_parameters():
    policy = small_agent(scripts(shifted(3)), reconstruction_coef=0.1).policy
    grouped = [parameter for group in parameter_groups(policy).values() for parameter in group]
    assert sorted(map(id, grouped)) == sorted(map(id, policy.parameters()))


def test_group_contains_parameters_of_its_module():
    policy = small_agent(scripts(shifted(3))).policy
    block = policy.transformer.blocks[1]
    for name, part in {
        "attention": block.attention,
        "feed_forward_gate": block.feed_forward_norm.residual,
    }.items():
        assert set(map(id, parameter_groups(policy)[f"layer_2/{name}"])) == set(map(id, part.parameters()))


class HistogramRecorder(BaseCallback):
    """Copy weights, gradients and rollout data when histograms are recorded."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        groups, buffer = parameter_groups(self.model.policy), self.model.rollout_buffer
        real = buffer.weight == 1
        self.copies = {
            f"rollout/{name}": getattr(buffer, name)[real] for name in ("advantages", "values", "actions")
        }
        for group, parameters in groups.items():
            self.copies[f"weights/{group}"] = flat([p.detach() for p in parameters])
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.copies[f"gradients/{group}"] = flat(gradients)


def flat(parts) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts]).clone()


def assert_histogram_of(histogram, numbers: torch.Tensor) -> None:
    values = numbers.flatten().double().numpy()
    assert histogram.num == len(values)
    copies = (histogram.min, histogram.max, histogram.sum, histogram.sum_squares)
    expected = (values.min(), values.max(), values.sum(), (values**2).sum())
    np.testing.assert_allclose(copies, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rollouts", [1, 2])
def test_histograms_match_weights_gradients_and_rollout(tmp_path, rollouts):
    agent, recorder = logging_agent(tmp_path, n_epochs=1), HistogramRecorder()
    agent.learn(rollouts * ROLLOUT, [recorder, HistogramCallback(every_rollouts=1)])
    log = events(tmp_path)
    assert set(log.Tags()["histograms"]) == set(recorder.copies)
    assert any(tag.startswith("gradients/") for tag in recorder.copies) == (rollouts == 2)
    for tag, numbers in recorder.copies.items():
        last = log.Histograms(tag)[-1]
        assert last.step == rollouts * ROLLOUT
        assert_histogram_of(last.histogram_value, numbers)


def test_filler_rows_are_excluded(tmp_path):
    agent = logging_agent(tmp_path, env=next_step_scripts(shifted(3)))
    agent.learn(ROLLOUT, HistogramCallback())
    real = int(agent.rollout_buffer.weight.sum())
    assert real < ROLLOUT
    log = events(tmp_path)
    assert log.Histograms("rollout/values")[0].histogram_value.num == real


def test_nonfinite_values_are_left_out(tmp_path):
    agent = logging_agent(tmp_path)
    callback = HistogramCallback()
    agent.learn(2 * ROLLOUT, callback)
    agent.policy.value_net.weight.grad[0, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    agent.policy.value_net.bias.grad[:] = torch.nan
    agent.policy.transformer.norm.weight.grad[:] = torch.nan
    agent.policy.transformer.norm.bias.grad[:] = torch.nan
    callback.record()
    agent.logger.dump(10**6)
    log = events(tmp_path)
    last = log.Histograms("gradients/value_head")[-1]
    assert (last.step, last.histogram_value.num) == (10**6, 16 - 3)
    assert log.Histograms("gradients/final_norm")[-1].step < 10**6


def test_other_log_formats_have_no_histograms(tmp_path):
    agent = logging_agent(tmp_path, formats=("tensorboard", "csv", "json", "log"))
    agent.learn(ROLLOUT, HistogramCallback())
    for name in ("progress.csv", "progress.json", "log.txt"):
        text = (tmp_path / name).read_text()
        assert "fps" in text
        assert "weights" not in text


def test_without_tensorboard_nothing_is_recorded(tmp_path):
    agent, callback = logging_agent(tmp_path, formats=("csv",)), HistogramCallback()
    agent.learn(ROLLOUT, callback)
    callback.record()
    assert not [tag for tag in agent.logger.name_to_value if tag.startswith(("weights", "rollout"))]


@pytest.mark.parametrize(
    "size", [1, 10, HISTOGRAM_VALUES - 1, HISTOGRAM_VALUES, HISTOGRAM_VALUES + 1, 3 * HISTOGRAM_VALUES + 7]
)
def test_sample_is_evenly_spaced(size):
    numbers = torch.arange(size).view(1, size)
    taken = subsample([numbers[:, : size // 3], numbers[:, size // 3 :]], HISTOGRAM_VALUES)
    assert len(taken) <= HISTOGRAM_VALUES
    assert len(taken) >= min(size, HISTOGRAM_VALUES // 2)
    assert taken[0] == 0
    assert len(set(taken.diff().tolist())) <= 1


MAP_STEPS, MAP_MEMORY, LAYERS, HEADS = 6, 5, 2, 3
EPISODES = [-1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 2]
POSITIONS = [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 0]
"""Two empty slots, then episodes that start at times -3, 2 and 5."""


def drawn():
    """Return a figure, its weights and the attention mask."""
    key = TokenIndex(torch.tensor([POSITIONS]), torch.tensor([EPISODES]))
    mask = AttentionMask(key.last(MAP_STEPS), key, Window(MAP_MEMORY + 1), True, torch.float32)
    starts = (key.position == 0) & (key.episode >= 0)
    scores = torch.randn(
        LAYERS, HEADS, MAP_STEPS, MAP_STEPS + MAP_MEMORY, generator=torch.Generator().manual_seed(0)
    )
    weights = list((scores + mask.mask[0]).softmax(-1))
    numbered = dict(enumerate(weights, start=1))
    return attention_figure(numbered, mask.allowed[0], starts[0]), weights, mask.allowed[0]


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


def test_figure_has_panel_for_each_layer_and_head():
    figure, _, _ = drawn()
    titles = [panel.get_title() for panel in panels(figure)]
    assert titles == [f"layer {n}, head {h}" for n in (1, 2) for h in (1, 2, 3)]


def test_panel_shows_weights_from_first_attended_key():
    figure, weights, allowed = drawn()
    first = EPISODES.index(0)
    for panel, expected in zip(panels(figure), torch.cat(weights), strict=True):
        (image,) = panel.images
        shown = image.get_array()
        np.testing.assert_array_equal(shown.mask, ~allowed[:, first:].numpy())
        np.testing.assert_array_equal(shown.compressed(), expected[:, first:][allowed[:, first:]].numpy())


def test_axes_have_memory_at_negative_times():
    (image,) = panels(drawn()[0])[0].images
    assert image.get_extent() == [-3.5, 5.5, 5.5, -0.5]


def test_lines_mark_episode_starts_and_end_of_memory():
    panel = panels(drawn()[0])[0]
    upright = sorted(
        line.get_xdata()[0] for line in panel.lines if line.get_xdata()[0] == line.get_xdata()[1]
    )
    level = sorted(line.get_ydata()[0] for line in panel.lines if line.get_ydata()[0] == line.get_ydata()[1])
    assert upright == [-0.5, 1.5, 4.5]
    assert level == [1.5, 4.5]


def test_all_panels_have_same_color_scale():
    figure, weights, _ = drawn()
    scales = {image.get_clim() for panel in panels(figure) for image in panel.images}
    assert scales == {(0.0, float(torch.cat(weights).max()))}


def test_maps_are_written_as_tensorboard_images(tmp_path):
    agent = logging_agent(tmp_path, formats=("tensorboard", "csv", "json", "log"))
    agent.learn(3 * ROLLOUT, AttentionMapCallback())
    images = events(tmp_path).Images("attention/maps")
    assert [image.step for image in images] == [ROLLOUT, 3 * ROLLOUT]
    for image in images:
        picture = Image.open(BytesIO(image.encoded_image_string))
        assert picture.size == (image.width, image.height)
        assert len(picture.getcolors(10**6)) > 50
    assert "attention/maps" not in (tmp_path / "progress.csv").read_text()


def test_no_figure_without_tensorboard(tmp_path):
    agent, callback = logging_agent(tmp_path, formats=("csv",)), AttentionMapCallback()
    agent.learn(ROLLOUT, callback)
    callback.record()
    assert "attention/maps" not in agent.logger.name_to_value
