"""Tests of held-out episodes: training without them, the loss on them, and the best checkpoint by it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import KVWriter, Logger

from rlxf import BehaviorCloning, DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, MaxReturn, QRegularized
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.data import UniformEpisodes
from rlxf.evaluation import BestValidationCallback
from rlxf.training import CheckpointFolder, CheckpointWriter
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    small_agent,
    small_pretraining,
    some_trajectories,
)
from tests.agents.mlp.worlds import small_mlp
from tests.agents.trainings import StopAt
from tests.ranks import on_ranks

FRACTION = {"validation_fraction": 0.4, "validation_seed": 1}
DROPOUT = CORES["published with dropout"]
MAKERS = {
    "DecisionTransformer": partial(small_agent, core=DROPOUT),
    "discrete": partial(small_agent, some_trajectories(action_space=ACTIONS["MultiDiscrete"])),
    "memory": partial(small_agent, core=CORES["GTrXL"]),
    "episode": partial(small_agent, core=CORES["GTrXL"], context="episode"),
    "MaximumEntropy": partial(small_agent, objective=MaximumEntropy()),
    "QRegularized": partial(small_agent, objective=QRegularized(hidden_sizes=(8,))),
    "MaxReturn": partial(small_agent, conditioning=MaxReturn()),
    "BehaviorCloning": partial(small_mlp, "BehaviorCloning", context_length=3),
    "ReturnConditionedMLP": partial(small_mlp, "ReturnConditionedMLP", dropout=0.3),
    "MaskedPretraining": partial(small_pretraining, mask_probability=0.5),
}


def held_out_episodes(agent):
    _, windows = agent.windows(agent.trajectories).split(agent.validation_fraction, agent.validation_seed)
    return windows.episodes


def drawn_episodes(agent):
    """Return the episodes of 500 windows of the training."""
    data, windows = agent.trajectories, agent._training_windows(agent.windows(agent.trajectories))
    drawn = windows.draw(500, torch.Generator().manual_seed(0)).numpy()
    return set(np.searchsorted(data.offsets, drawn, side="right") - 1)


@pytest.mark.parametrize("options", [{}, {"sampling": UniformEpisodes()}, {"weight_averaging": 0.9}], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_held_out_episodes_are_not_trained_on(name, options):
    agent = MAKERS[name](**FRACTION, **options)
    assert len(held_out_episodes(agent))
    assert drawn_episodes(agent) == set(range(agent.trajectories.episodes)) - set(held_out_episodes(agent))


def poisoned(data, episodes):
    """Return data with other actions and rewards in the given episodes."""
    steps, actions, returns = data.steps_of(episodes), data.actions.copy(), data.return_to_go.copy()
    actions[steps] = actions[steps[::-1]]
    returns[steps] *= 0.5
    return replace(data, actions=actions, return_to_go=returns)


def test_actions_of_held_out_episodes_do_not_change_the_training():
    data = some_trajectories()
    fixed = {"return_scale": 1.0, **FRACTION}
    one = small_agent(data, **fixed)
    other = small_agent(poisoned(data, held_out_episodes(one)), **fixed)
    one.learn(5)
    other.learn(5)
    assert all(
        torch.equal(value, other.policy.state_dict()[k]) for k, value in one.policy.state_dict().items()
    )
    assert one.validation_losses() != other.validation_losses()


def slow_action_loss(agent):
    """Return the mean error of the action head over all held-out steps, one window at a time."""
    data, model, errors = agent.trajectories, agent.policy.eval(), []
    for episode in held_out_episodes(agent):
        for start in range(int(data.offsets[episode]), int(data.offsets[episode + 1]), agent.context_length):
            batch = agent.windows(data).starting_at([start])
            y = model.outputs(model.steps(batch))
            errors += model.loss.head.error(y, batch.actions)[batch.mask].tolist()
    return np.mean(errors)


@pytest.mark.parametrize("name", ["DecisionTransformer", "discrete", "MaximumEntropy", "QRegularized"])
def test_the_loss_is_the_mean_error_of_the_action(name):
    agent = MAKERS[name](**FRACTION).learn(2)
    with torch.no_grad():
        assert agent.validation_losses() == {"loss": pytest.approx(slow_action_loss(agent), rel=1e-5)}


@pytest.mark.parametrize("name", MAKERS)
def test_the_loss_is_deterministic_and_does_not_affect_the_training(name):
    one, other = MAKERS[name](**FRACTION).learn(2), MAKERS[name](**FRACTION).learn(2)
    state = torch.get_rng_state()
    losses = one.validation_losses()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert one.validation_losses() == losses
    torch.set_rng_state(state)
    one.learn(2)
    torch.set_rng_state(state)
    other.learn(2)
    assert all(
        torch.equal(value, other.policy.state_dict()[k]) for k, value in one.policy.state_dict().items()
    )


def test_random_numbers_of_a_module_of_the_user_are_the_same_in_each_validation():
    agent = next(iter(MAKERS.values()))(**FRACTION)
    losses = agent.validation_losses()
    agent.policy.features.register_forward_hook(lambda module, inputs, y: y + torch.randn_like(y))
    noisy = agent.validation_losses()
    assert noisy != losses
    torch.manual_seed(7)
    assert agent.validation_losses() == noisy


@pytest.mark.parametrize("name", MAKERS)
def test_the_loss_does_not_depend_on_the_batch_size(name):
    one, other = MAKERS[name](**FRACTION), MAKERS[name](**FRACTION, batch_size=3)
    expected = {key: pytest.approx(loss, rel=1e-4) for key, loss in other.validation_losses().items()}
    if name != "MaskedPretraining":  # masks are drawn batch by batch
        assert one.validation_losses() == expected


def test_predicted_returns_are_part_of_the_loss():
    losses = MAKERS["MaxReturn"](**FRACTION).validation_losses()
    assert losses["loss"] == pytest.approx(losses["action_loss"] + losses["return_loss"])


def test_the_loss_is_that_of_the_averaged_weights():
    agent = small_agent(weight_averaging=0.5, learning_rate=1e-2, **FRACTION).learn(5)
    plain = small_agent(**FRACTION)
    plain.policy.load_state_dict(agent.policy.state_dict())
    assert plain.validation_losses() == agent.validation_losses()
    plain.policy.load_state_dict(agent._update.trained.state_dict())
    assert plain.validation_losses() != agent.validation_losses()


def test_agents_with_other_seeds_hold_out_the_same_episodes():
    one, other = (small_agent(seed=seed, **FRACTION) for seed in (0, 1))
    assert (held_out_episodes(one) == held_out_episodes(other)).all()


def test_the_best_episodes_are_split():
    data = some_trajectories(lengths=(3,) * 20)
    agent = small_mlp("BehaviorCloning", data, best=0.25, validation_fraction=0.2)
    best = set(data.best_episodes(0.25))
    assert len(held_out_episodes(agent)) == 1
    assert drawn_episodes(agent) | set(held_out_episodes(agent)) == best


class LogWriter(KVWriter):
    """Log writer that records the values of `validation/loss` by step."""

    def __init__(self):
        self.losses = {}

    def write(self, key_values, key_excluded, step=0):
        if "validation/loss" in key_values:
            self.losses[step] = key_values["validation/loss"]

    def close(self):
        pass


def test_the_callback_logs_and_saves_the_lowest_loss(tmp_path):
    agent, writer = small_agent(learning_rate=3e-2, **FRACTION), LogWriter()
    agent.set_logger(Logger(None, [writer]))
    callback = BestValidationCallback(3, tmp_path / "best.zip")
    agent.learn(20, callback)
    assert [*callback.losses] == [3, 6, 9, 12, 15, 18]
    assert writer.losses == callback.losses
    assert (callback.best, callback.best_step) == min((loss, step) for step, loss in callback.losses.items())
    saved = DecisionTransformer.load(tmp_path / "best.zip", agent.trajectories, device="cpu")
    assert saved.num_timesteps == callback.best_step
    assert saved.validation_losses()["loss"] == callback.best


def test_a_second_training_has_losses_of_its_own():
    agent, callback = small_agent(**FRACTION), BestValidationCallback(3)
    agent.learn(6, callback).learn(3, callback)
    assert [*callback.losses] == [3]


def test_losses_that_are_not_finite_are_not_the_lowest(tmp_path, monkeypatch):
    losses = iter([float("nan"), 1.0, float("inf"), 0.5])
    agent = small_agent(**FRACTION)
    monkeypatch.setattr(agent, "validation_losses", lambda: {"loss": next(losses)})
    callback = BestValidationCallback(1, tmp_path / "best.zip")
    saving = CheckpointWriter(CheckpointFolder(tmp_path), 0, {"validation": callback})
    agent.learn(4, [callback, saving])
    assert (callback.best, callback.best_step) == (0.5, 4)


def test_a_resumed_training_finds_the_same_best_checkpoint(tmp_path):
    def learn(folder, stop, **options):
        callback = BestValidationCallback(2, folder / "best.zip")
        saving = CheckpointWriter(CheckpointFolder(folder / "checkpoints"), 0)
        small_agent(learning_rate=3e-2, **FRACTION).learn(12, [callback, saving, StopAt(stop)], **options)
        return callback

    whole = learn(tmp_path / "whole", 12)
    learn(tmp_path / "parts", 7)
    parts = learn(tmp_path / "parts", 12, resume_from=tmp_path / "parts" / "checkpoints")
    assert (parts.best, parts.best_step) == (whole.best, whole.best_step)
    assert (tmp_path / "parts/best.zip").read_bytes() == (tmp_path / "whole/best.zip").read_bytes()


def test_the_callback_needs_held_out_episodes():
    agent = small_agent()
    with pytest.raises(
        ValueError, match="got DecisionTransformer without validation_fraction: build it with"
    ):
        agent.learn(2, BestValidationCallback(1))
    assert agent.num_timesteps == 0
    with pytest.raises(ValueError, match="there are no held-out episodes: build the agent with"):
        agent.validation_losses()
    with pytest.raises(ValueError, match="every_steps must be at least 1, got 0"):
        BestValidationCallback(0)
    with pytest.raises(ValueError, match=r"every_steps must be a whole number, got 1\.5"):
        BestValidationCallback(every_steps=1.5)


def test_the_loss_needs_data(tmp_path):
    small_agent(**FRACTION).save(tmp_path / "agent.zip")
    agent = DecisionTransformer.load(tmp_path / "agent.zip", device="cpu")
    assert agent.validation_fraction == 0.4
    with pytest.raises(ValueError, match="loaded without data"):
        agent.validation_losses()


@pytest.mark.filterwarnings("ignore:the only episode")
@pytest.mark.parametrize("kind", [DecisionTransformer, BehaviorCloning, MaskedPretraining])
def test_a_single_episode_cannot_be_split(kind):
    with pytest.raises(
        ValueError, match=r"validation_fraction=0.1 .* at least two, got 1: use validation_fraction"
    ):
        kind(some_trajectories(lengths=(9,)), validation_fraction=0.1, device="cpu")


def test_a_single_best_episode_cannot_be_split():
    data = some_trajectories(lengths=(3,) * 10)
    with pytest.raises(ValueError, match="needs at least two, got 1"):
        BehaviorCloning(data, best=0.1, validation_fraction=0.5, device="cpu")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"validation_fraction": 1},
            ValueError,
            "validation_fraction must be .* more than 0 and less than 1 or",
        ),
        (
            {"validation_fraction": "a"},
            TypeError,
            "validation_fraction must be a finite number of .* got 'a'",
        ),
        ({"validation_seed": -1}, ValueError, "validation_seed must be an integer from 0 to .* got -1"),
        ({"validation_seed": 0.5}, TypeError, "validation_seed must be an integer from 0 to .* got 0.5"),
    ],
)
def test_bad_settings_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        small_agent(**options)


def measured():
    callback = BestValidationCallback(2)
    agent = small_agent(core=CORES["memory"], learning_rate=1e-3, **FRACTION)
    for group in agent.optimizer.param_groups:
        group["eps"] = 1e-3  # prevents large steps for gradients of rounding errors
    agent.learn(4, callback if agent.ranks.is_main else None)
    return callback.losses


def test_one_of_two_processes_measures_the_loss():
    expected = measured()
    main, other = on_ranks(2, measured)
    assert main == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}
    assert other == {}
