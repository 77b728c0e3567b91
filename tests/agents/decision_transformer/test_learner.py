"""Tests of `learn`: results, schedules, logs, callbacks and reproducibility."""

import re
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import BehaviorCloning, DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy, decision_transformer
from rlxf.agents.offline import data_warnings
from rlxf.agents.offline.data_warnings import warn_of_other_moments
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.training import CosineSchedule, linear
from tests.agents.decision_transformer.worlds import ACTIONS, VECTOR, shown, small_agent, some_trajectories

TINY = decision_transformer(width=16, layers=1, heads=1, dropout=0.0)


def return_determines_actions(actions):
    """Return episodes whose actions depend on the return alone."""
    data = some_trajectories(VECTOR, actions, lengths=(6,) * 40)
    better = np.repeat(np.arange(40) % 2, 6)
    chosen = better if isinstance(actions, spaces.Discrete) else np.where(better, 0.9, -0.9)[:, None]
    rewards = better.astype(np.float32)
    returns = rewards * np.tile(np.arange(6, 0, -1, np.float32), 40)
    changes = {"actions": chosen.astype(data.actions.dtype), "rewards": rewards, "return_to_go": returns}
    return some_trajectories(VECTOR, actions, lengths=(6,) * 40, **changes)


@pytest.mark.parametrize("objective", [None, MaximumEntropy()], ids=["imitation", "maximum entropy"])
@pytest.mark.parametrize("actions", [spaces.Discrete(2), spaces.Box(-1, 1, (1,))], ids=["choice", "number"])
def test_actions_follow_the_target_return(actions, objective):
    data = return_determines_actions(actions)
    agent = DecisionTransformer(
        data, 3, learning_rate=1e-2, seed=0, core=TINY, objective=objective, device="cpu"
    )
    agent.learn(150)
    observation = shown(data, np.array([0, 0]))
    observation["return_to_go"] = np.array([[0.0], [6.0]], np.float32)
    low, high = agent.predict(observation)[0]
    assert low < 0.5 < high


NESTED = {
    "alone": lambda callback: callback,
    "in a list": lambda callback: [lambda *_: True, callback],
    "in SB3's list": lambda callback: CallbackList([callback]),
    "every so often": lambda callback: EveryNTimesteps(1, callback),
}


@pytest.mark.parametrize("place", NESTED.values(), ids=NESTED)
def test_eval_callback_runs_during_training(place, cartpole, tmp_path):
    agent = DecisionTransformer(cartpole, 4, batch_size=4, core=TINY, seed=0, device="cpu")
    env = ReturnToGo(agent.make_env(2), 2.0)
    eval_callback = EvalCallback(env, n_eval_episodes=2, eval_freq=2, log_path=str(tmp_path), verbose=0)
    agent.learn(4, place(eval_callback))
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [2, 4]
    assert agent.get_env() is None


def test_eval_callback_does_not_replace_the_agents_environment(cartpole):
    agent = DecisionTransformer(cartpole, 4, batch_size=4, core=TINY, seed=0, device="cpu")
    own, other = (ReturnToGo(agent.make_env(1), 2.0) for _ in range(2))
    agent.set_env(own)
    values = []
    agent.learn(1, [EvalCallback(other, verbose=0), lambda *_: values.append(agent.get_env()) is None])
    assert values == [own]
    assert agent.get_env() is own


def test_eval_callback_requires_return_to_go(cartpole):
    agent = DecisionTransformer(cartpole, 4, batch_size=4, core=TINY, seed=0, device="cpu")
    with pytest.raises(
        TypeError, match=r"not a return-conditioned VecEnv: .+ wrap it, rlxf\.envs\.ReturnToGo\("
    ):
        agent.learn(4, EvalCallback(agent.make_env(1), eval_freq=2))
    assert agent._n_updates == 0


def weights(agent):
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("objective", [None, MaximumEntropy()], ids=["imitation", "maximum entropy"])
def test_equal_seeds_give_bitwise_equal_weights(objective):
    core = decision_transformer(width=16, layers=2, heads=2, dropout=0.2)
    first, again, other = (
        weights(small_agent(seed=seed, core=core, objective=objective).learn(5)) for seed in (0, 0, 1)
    )
    assert same(first, again)
    assert not same(first, other)


def rates(agent, updates, **options):
    values = []
    agent.learn(updates, recording(lambda: values.append(agent.optimizer.param_groups[0]["lr"])), **options)
    return values


def recording(record):
    """Return a callback that calls ``record`` and never stops the training."""
    return lambda values, _: (record(), True)[1]


def test_default_warm_up_is_a_tenth_of_the_updates():
    expected = [0.25, 0.5, 0.75, *[1.0] * 37]
    assert rates(small_agent(learning_rate=1.0), 40) == pytest.approx(expected)


@pytest.mark.parametrize("last", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_out_of_range_is_refused_before_the_update(last):
    agent = small_agent(learning_rate=lambda progress: 1e-3 if progress > 0.5 else last, warmup_updates=0)
    weights = []

    def record(*_):
        weights[:] = [parameter.detach().clone() for parameter in agent.policy.parameters()]
        return True

    message = rf"the schedule learning_rate=.* gives {last} in update 6; it must be finite and at least 0"
    with pytest.raises(ValueError, match=message):
        agent.learn(10, record)
    assert all(map(torch.equal, weights, agent.policy.parameters()))


def test_the_schedule_applies_during_warm_up():
    expected = [0.5 * 1.0, 1.0 * 0.9, *np.linspace(0.8, 0.1, 8)]
    assert rates(small_agent(learning_rate=linear(1.0, 0.0), warmup_updates=2), 10) == pytest.approx(expected)


def test_cosine_schedule_is_half_in_the_middle():
    values = rates(small_agent(learning_rate=CosineSchedule(1e-3, 0.0), warmup_updates=0), 10)
    assert values[5] == pytest.approx(5e-4)
    assert values == sorted(values, reverse=True)


def test_reset_num_timesteps_false_continues_schedule_and_count():
    agent = small_agent(learning_rate=linear(1.0, 0.0), warmup_updates=0)
    rates(agent, 10)
    assert rates(agent, 10, reset_num_timesteps=False) == pytest.approx(np.linspace(0.5, 0.05, 10))
    assert agent.num_timesteps == 20


def test_the_temperature_has_no_weight_decay():
    agent = small_agent(objective=MaximumEntropy(), weight_decay=0.5)
    (decaying, kept) = agent.optimizer.param_groups
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    assert [id(p) for p in kept["params"]] == [id(agent.policy.loss.log_temperature)]
    assert len(decaying["params"]) == len(list(agent.policy.parameters())) - 1


def test_tensorboard_tags(tmp_path):
    agent = small_agent(objective=MaximumEntropy(), tensorboard_log=str(tmp_path))
    agent.learn(20, log_interval=10)
    events = EventAccumulator(str(tmp_path / "DecisionTransformer_1")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {
        "train/loss",
        "train/nll",
        "train/entropy",
        "train/ent_coef",
        "train/grad_norm",
        "train/learning_rate",
        "time/updates_per_second",
    }
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20]


def test_the_logged_loss_is_the_mean_since_the_last_output(tmp_path):
    agent, losses = small_agent(), []
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    original = agent.policy.losses

    def recorded(batch):
        parts = original(batch)
        losses.append(parts["loss"].item())
        return parts

    agent.policy.losses = recorded
    agent.learn(6, log_interval=3)
    rows = np.genfromtxt(tmp_path / "progress.csv", delimiter=",", names=True)
    assert rows["trainloss"] == pytest.approx([np.mean(losses[:3]), np.mean(losses[3:])])


def test_a_callback_may_stop_the_training():
    agent = small_agent()
    agent.learn(50, lambda values, _: agent.num_timesteps < 7)
    assert agent.num_timesteps == 7


def test_sb3_checkpoint_callback_and_progress_bar(tmp_path, capsys):
    agent = small_agent()
    agent.learn(6, CheckpointCallback(save_freq=3, save_path=tmp_path), progress_bar=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rl_model_3_steps.zip",
        "rl_model_6_steps.zip",
    ]
    assert "6/6" in "".join(capsys.readouterr())


def test_default_return_scale_is_the_standard_deviation_of_returns_to_go():
    data = some_trajectories()
    assert small_agent(data).return_scale == pytest.approx(np.std(data.return_to_go, dtype=np.float64))
    assert small_agent(data, return_scale=7.0).return_scale == 7.0
    flat = some_trajectories(return_to_go=np.zeros(data.steps, np.float32))
    assert small_agent(flat).return_scale == 1.0


def test_default_episode_length_is_that_of_the_longest_episode():
    assert small_agent().policy.tokens.time.num_embeddings == 14


@pytest.mark.parametrize("actions", ACTIONS)
def test_all_action_spaces_can_be_trained(actions):
    agent = small_agent(some_trajectories(action_space=ACTIONS[actions]))
    before = weights(agent)
    assert not same(before, weights(agent.learn(2)))


def warned_of(build):
    """Return the messages of a call, after a check that they are attributed to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


def test_equal_returns_and_missing_ends_warn_when_the_data_are_given(tmp_path):
    data = some_trajectories(lengths=(2, 2))
    equal = replace(data.with_rewards([2, 1, 1, 2]), terminated=np.zeros(2, bool))
    settings = {"context_length": 2, "core": TINY, "device": "cpu"}
    agent = DecisionTransformer(data, **settings)
    agent.save(tmp_path / "agent")
    assert warned_of(lambda: DecisionTransformer(data, **settings).learn(1)) == []
    assert warned_of(lambda: DecisionTransformer.load(tmp_path / "agent", data, device="cpu")) == []
    for build in (
        lambda: DecisionTransformer(equal, **settings).learn(1),
        lambda: DecisionTransformer.load(tmp_path / "agent", equal, device="cpu").learn(1),
    ):
        returns, ends = warned_of(build)
        assert returns.startswith("all 2 episodes have the return 3, so the data do not show")
        assert ends.startswith("2 of 2 episodes end neither terminated nor truncated")


@pytest.mark.parametrize(
    ("agent", "sizes"), [(DecisionTransformer, {"core": TINY}), (BehaviorCloning, {"hidden_sizes": (4,)})]
)
def test_actions_that_use_a_small_part_of_their_bounds_warn_when_the_data_are_given(tmp_path, agent, sizes):
    used = some_trajectories(lengths=(2, 3))
    narrow = replace(used, action_space=spaces.Box(-1000, 1000, (2,)))
    settings = {"context_length": 2, "device": "cpu", **sizes}
    assert warned_of(lambda: agent(used, **settings)) == []
    (message,) = warned_of(lambda: agent(narrow, **settings).save(tmp_path / "agent"))
    assert message.startswith("the action components 0, 1, counted from 0, use less than 5% of the range")
    assert warned_of(lambda: agent.load(tmp_path / "agent", narrow, device="cpu")) == [message]


def test_returns_of_other_rewards_warn(tmp_path):
    data = some_trajectories(lengths=(2, 3))
    changed = replace(data, rewards=data.rewards + np.array([0, 0, 1, 0, 0], np.float32))
    settings = {"core": TINY, "context_length": 2, "device": "cpu"}
    (message,) = warned_of(lambda: DecisionTransformer(changed, **settings).save(tmp_path / "agent"))
    assert warned_of(lambda: DecisionTransformer.load(tmp_path / "agent", changed, device="cpu")) == [message]
    assert message.startswith("the rewards and the returns-to-go of the data differ in 1 steps: in step 2,")
    assert "use Trajectories.with_rewards(rewards)" in message


def scaled_observations(data, scale=1000, shift=5000):
    return data.observations * np.float32(scale) + np.float32(shift)


def test_moments_of_other_observations_warn():
    data, settings = some_trajectories(lengths=(20, 30)), {"core": TINY, "context_length": 2, "device": "cpu"}
    rows = scaled_observations(data)
    (message,) = warned_of(lambda: DecisionTransformer(replace(data, observations=rows), **settings))
    assert "are not those of the observations: 3 of 3 features differ, and feature 0 has the mean" in message
    assert message.endswith("use Trajectories.with_observations(observations)")
    assert warned_of(lambda: DecisionTransformer(data.with_observations(rows), **settings)) == []


def test_observations_that_replace_standardized_ones_warn():
    data = some_trajectories(lengths=(20, 30))
    rows = np.tile(np.array([[-1.0], [1.0]], np.float32), (25, 3))
    standardized = data.with_observations(rows)
    assert (standardized.observation_std == 1).all()
    (message,) = warned_of(lambda: warn_of_other_moments(replace(standardized, observations=rows * 1000)))
    assert "3 of 3 features differ" in message
    assert warned_of(lambda: warn_of_other_moments(replace(standardized, observations=rows * 0))) == []
    assert warned_of(lambda: warn_of_other_moments(replace(standardized, observations=rows / 1000))) == []


def test_features_that_were_constant_in_the_first_data_warn(tmp_path):
    data = some_trajectories(lengths=(20, 30))
    rows = data.observations.copy()
    rows[:, 1] = 0
    constant = data.with_observations(rows)
    rows = rows.copy()
    rows[:, 1] = np.tile(np.array([-1e5, 1e5], np.float32), 25)
    varying = data.with_observations(rows)
    for name, first, second, expected in (("c", constant, varying, 1), ("v", varying, constant, 0)):
        BehaviorCloning(first, device="cpu").save(tmp_path / name)
        messages = warned_of(partial(BehaviorCloning.load, tmp_path / name, second, device="cpu"))
        assert len(messages) == expected
        assert all("of observations, 1 of 3 features differ, and feature 1" in each for each in messages)


def test_moments_of_periodic_features_do_not_warn():
    data = some_trajectories(lengths=(200_000,))
    rows = data.observations.copy()
    rows[:, 0] = np.arange(200_000) % 2
    assert warned_of(lambda: warn_of_other_moments(data.with_observations(rows))) == []


@pytest.mark.parametrize(("width", "most"), [(3, 100_000), (2**11, 2**13), (2**16, 1_000)])
def test_moments_of_wide_observations_are_estimated_from_fewer_steps(width, most):
    rows = np.broadcast_to(np.float32(0), (100_001, width))
    data = replace(some_trajectories(lengths=(2,)), observations=rows, rewards=np.zeros(100_001, np.float32))
    steps = data_warnings._sampled_steps(data)
    assert len(np.unique(steps)) == len(steps) == most
    assert (np.diff(steps) > 0).all()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda data: data.with_observations(scaled_observations(data)),
            "; build a new agent to normalize",
        ),
        (lambda data: data.with_observations(scaled_observations(data, 0.01, 0)), "observations, 3 of 3"),
        (lambda data: data.with_rewards(data.rewards * 1000), "; pass return_scale="),
        (lambda data: data.with_rewards(data.rewards * 2), None),
    ],
)
def test_loading_with_data_of_another_scale_warns(tmp_path, change, expected):
    data = some_trajectories(lengths=(20, 30))
    DecisionTransformer(data, core=TINY, context_length=2, device="cpu").save(tmp_path / "agent")
    messages = warned_of(lambda: DecisionTransformer.load(tmp_path / "agent", change(data), device="cpu"))
    assert len(messages) == (expected is not None)
    assert all(expected in message for message in messages)


def test_a_chosen_scale_of_returns_does_not_warn(tmp_path):
    data = some_trajectories(lengths=(20, 30))
    data = data.with_rewards(data.rewards)
    scaled = data.with_rewards(data.rewards * 1000)
    settings = {"core": TINY, "context_length": 2, "device": "cpu"}
    path, chosen_path = tmp_path / "agent", tmp_path / "chosen"
    DecisionTransformer(data, **settings).save(path)
    DecisionTransformer(data, return_scale=1000.0, **settings).save(chosen_path)
    (message,) = warned_of(lambda: DecisionTransformer.load(path, scaled, device="cpu"))
    scale = float(re.search(r"pass return_scale=(\S+) to load", message)[1])
    assert scale == pytest.approx(scaled.return_to_go.std(), rel=1e-2)
    for given in ({"path": path, "return_scale": scale}, {"path": path, "return_scale": 1.0}):
        assert warned_of(partial(DecisionTransformer.load, dataset=scaled, device="cpu", **given)) == []
    for dataset in (data, scaled):
        assert warned_of(partial(DecisionTransformer.load, chosen_path, dataset, device="cpu")) == []


def test_returns_of_another_scale_do_not_concern_behavior_cloning(tmp_path):
    data = some_trajectories(lengths=(20, 30))
    BehaviorCloning(data, device="cpu").save(tmp_path / "agent")
    other = data.with_rewards(data.rewards * 1000)
    assert warned_of(lambda: BehaviorCloning.load(tmp_path / "agent", other, device="cpu")) == []


def test_images_that_are_encoded_as_vectors_warn():
    data = some_trajectories(spaces.Box(0, 1, (36, 36, 1), np.float32), lengths=(2, 3))
    (message,) = warned_of(lambda: BehaviorCloning(data, device="cpu"))
    assert message.endswith(
        "to 1,296 numbers, since only a uint8 Box from 0 to 255 is an image: store uint8 from 0 "
        "to 255 to use a convolution"
    )


@pytest.mark.parametrize(("longest", "episode_length"), [(10_001, None), (10_000, None), (10_001, 50)])
def test_many_embeddings_of_time_steps_warn(longest, episode_length):
    data = some_trajectories(lengths=(2, longest))
    settings = {"core": TINY, "context_length": 2, "episode_length": episode_length, "device": "cpu"}
    messages = warned_of(lambda: DecisionTransformer(data, **settings))
    assert len(messages) == (longest > 10_000 and episode_length is None)
    assert all(f"have {longest * TINY.width:,} parameters" in message for message in messages)
