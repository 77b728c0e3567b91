"""Tests of the agents: choice of episodes, conditioning on returns, environments and tools of SB3."""

from dataclasses import replace

import numpy as np
import pytest
from stable_baselines3.common.callbacks import EvalCallback, ProgressBarCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import BehaviorCloning, DecisionTransformer, ReturnConditionedMLP, collect, evaluate
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.data import DatasetError, load_trajectories
from rlxf.envs import ReturnToGo, make_vec_env
from rlxf.evaluation import EvaluationCallback
from rlxf.training import CheckpointError
from tests.agents.decision_transformer.worlds import ACTIONS, some_trajectories
from tests.agents.mlp.worlds import AGENTS, LENGTHS, environment_rows, small_mlp
from tests.datasets import ID, record_cartpole

TINY = {"hidden_sizes": (8,), "batch_size": 8, "seed": 0, "device": "cpu"}


@pytest.fixture
def cartpole(minari_root):
    """Return trajectories of random numbers with the spaces and the spec of CartPole-v1."""
    record_cartpole((9, 3, 12, 1, 2, 5, 4, 8, 3, 2, 6))
    return load_trajectories(ID)


@pytest.mark.parametrize(
    ("share", "count"), [(0.01, 1), (0.1, 1), (0.25, 3), (0.5, 6), (0.99, 11), (1.0, 12)]
)
def test_the_best_episodes_have_the_highest_returns(share, count):
    data = some_trajectories(lengths=LENGTHS)
    chosen = data.best_episodes(share)
    assert len(chosen) == count
    others = np.setdiff1d(np.arange(data.episodes), chosen)
    assert not len(others) or data.returns[chosen].min() >= data.returns[others].max()
    assert (np.diff(chosen) > 0).all()


def test_the_number_of_best_episodes_has_no_rounding_error():
    assert len(some_trajectories(lengths=(1,) * 100).best_episodes(0.29)) == 29


@pytest.mark.parametrize("best", [0.25, 1.0])
def test_batches_hold_the_steps_of_the_chosen_episodes_only(best):
    data = some_trajectories(lengths=LENGTHS)
    windows = small_mlp(trajectories=data, best=best).windows(data)
    drawn = np.unique(np.concatenate([windows.draw(50).numpy() for _ in range(20)]))
    chosen = [range(data.offsets[e], data.offsets[e + 1]) for e in data.best_episodes(best)]
    assert drawn.tolist() == sorted(step for steps in chosen for step in steps)


def test_all_episodes_define_normalization_and_range_of_returns():
    one, other = (small_mlp(best=best) for best in (1.0, 0.2))
    np.testing.assert_array_equal(*(each.policy.features.normalization.mean for each in (one, other)))
    assert one.return_range == other.return_range


@pytest.mark.parametrize("best", [0, -0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_errors(best):
    with pytest.raises(ValueError, match="best must be a finite number of more than 0 and at most 1, got"):
        small_mlp(best=best)


def test_a_share_of_few_episodes_is_an_error(tmp_path):
    few = some_trajectories(lengths=(3,) * 9)
    message = r"best=0.1 chooses .* needs at least 10 episodes, got 9: use best=1, or more data"
    with pytest.raises(ValueError, match=message):
        small_mlp(trajectories=few, best=0.1)
    small_mlp(best=0.1).save(tmp_path / "agent")
    with pytest.raises(ValueError, match=message):
        BehaviorCloning.load(tmp_path / "agent", few, device="cpu").learn(1)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (
            "BehaviorCloning",
            {"hidden_sizes": (3,)},
            CheckpointError,
            r"with hidden_sizes=\(3,\): it was",
        ),
        ("BehaviorCloning", {"context_length": 2}, CheckpointError, "it was saved with context_length=1"),
        ("BehaviorCloning", {"hidden_sizes": None}, ValueError, "leave it out to use that of the file"),
        (
            "BehaviorCloning",
            {"hidden_sizes": 5},
            TypeError,
            "must be an object of class Sequence, got 5",
        ),
        ("BehaviorCloning", {"objective": "Imitation"}, TypeError, "class Imitation or MaximumEntropy or Q"),
        ("BehaviorCloning", {"best": "all"}, TypeError, "best must be a finite number of .* got 'all'"),
        (
            "ReturnConditionedMLP",
            {"return_scale": None},
            ValueError,
            "return_scale must have a value to load",
        ),
        ("ReturnConditionedMLP", {"dropout": None}, ValueError, "dropout must have a value to load"),
    ],
)
def test_load_refuses_settings_that_do_not_fit_the_file(tmp_path, name, change, error, message):
    small_mlp(name).save(tmp_path / "agent.zip")
    with pytest.raises(error, match=message):
        AGENTS[name].load(tmp_path / "agent.zip", device="cpu", **change)


def equal_returns(lengths=LENGTHS):
    steps = sum(lengths)
    ends = np.cumsum(lengths) - 1
    rewards = np.zeros(steps, np.float32)
    rewards[ends] = 2.0
    return some_trajectories(lengths=lengths, rewards=rewards, return_to_go=np.full(steps, 2.0, np.float32))


def test_equal_returns_cannot_condition_an_agent():
    with pytest.raises(ValueError, match=r"all 12 episodes have the return 2, .* train rlxf.BehaviorCloning"):
        ReturnConditionedMLP(equal_returns(), **TINY)
    with pytest.warns(UserWarning, match="all 12 episodes have the return 2"):
        DecisionTransformer(equal_returns(), core=decision_transformer(width=8, layers=1), device="cpu")
    with pytest.warns(UserWarning, match="best=0.5 has no meaning") as found:
        BehaviorCloning(equal_returns(), best=0.5, **TINY)
    assert found[0].filename == __file__
    BehaviorCloning(equal_returns(), **TINY).learn(1)


def test_equal_returns_of_data_that_are_passed_to_load_warn(tmp_path):
    small_mlp(best=0.5).save(tmp_path / "agent.zip")
    with pytest.warns(UserWarning, match="best=0.5 has no meaning") as found:
        AGENTS["BehaviorCloning"].load(tmp_path / "agent.zip", equal_returns(), device="cpu")
    assert found[0].filename == __file__


def test_returns_that_differ_by_rounding_are_equal(tmp_path):
    """Returns of float32 sums differ by rounding; an agent that was loaded is refused such data, too."""
    data = equal_returns()
    returns = data.return_to_go.copy()
    returns[0] = np.nextafter(returns[0], np.float32(np.inf))
    rounded = replace(data, return_to_go=returns)
    assert np.ptp(rounded.returns) > 0
    with pytest.raises(ValueError, match="so the data do not show what a target return changes"):
        ReturnConditionedMLP(rounded, **TINY)
    ReturnConditionedMLP(some_trajectories(lengths=LENGTHS), **TINY).save(tmp_path / "agent.zip")
    with pytest.raises(ValueError, match="so the data do not show what a target return changes"):
        ReturnConditionedMLP.load(tmp_path / "agent.zip", data).learn(1)


@pytest.mark.parametrize("name", ["best", "dropout"])
def test_numbers_of_wrong_type_are_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be a finite number of .* got 'x'"):
        BehaviorCloning(some_trajectories(lengths=LENGTHS), **{name: "x"}, **TINY)


@pytest.mark.parametrize("name", AGENTS)
def test_logits_are_those_of_predictions(name):
    data = some_trajectories(lengths=LENGTHS, action_space=ACTIONS["Discrete"])
    agent, steps = small_mlp(name, data, context_length=2), data.offsets[:-1]
    rows, later = (environment_rows(agent, data, n) for n in (steps, np.minimum(steps + 1, data.steps - 1)))
    first, state = agent.action_logits(rows, episode_start=np.ones(len(steps), bool))
    chosen, other = agent.predict(rows, episode_start=np.ones(len(steps), bool))
    np.testing.assert_array_equal(first.argmax(dim=1), chosen)
    start = np.zeros(len(steps), bool)
    np.testing.assert_array_equal(
        agent.action_logits(later, state, start)[0].argmax(dim=1), agent.predict(later, other, start)[0]
    )
    with pytest.raises(TypeError, match="action_logits needs Discrete actions"):
        small_mlp(name).action_logits(rows)


@pytest.mark.parametrize("context_length", [1, 3])
def test_behavior_cloning_is_evaluated_without_a_target(cartpole, context_length):
    agent = BehaviorCloning(cartpole, context_length=context_length, **TINY).learn(3)
    report = evaluate(agent, episodes=5, n_envs=2)
    assert report.mean >= 1
    mean, _ = evaluate_policy(agent, agent.make_env(2, 0), 4)
    assert mean >= 1
    with pytest.raises(ValueError, match="target_returns needs an agent that is conditioned on a return"):
        evaluate(agent, episodes=2, target_returns=[1.0])
    with pytest.raises(DatasetError, match="does not fit dataset"):
        evaluate(agent, ReturnToGo(make_vec_env("CartPole-v1", 1), 1.0), 2)


@pytest.mark.parametrize("context_length", [1, 3])
def test_evaluations_equal_predictions_step_by_step(cartpole, context_length):
    agent = BehaviorCloning(cartpole, context_length=context_length, **TINY).learn(3)
    env = agent.make_env(1, 7)
    expected = evaluate_policy(agent, env, 3, return_episode_rewards=True)[0]
    env.seed(7)
    assert sorted(evaluate(agent, env, 3, seed=7).returns) == sorted(expected)


@pytest.mark.parametrize("context_length", [1, 3])
def test_a_return_conditioned_agent_is_evaluated_for_targets(cartpole, context_length):
    agent = ReturnConditionedMLP(cartpole, context_length=context_length, **TINY).learn(3)
    sweep = evaluate(agent, episodes=4, target_returns=[0.0, 1.0])
    assert np.isfinite(sweep.achieved).all()
    mean, _ = evaluate_policy(agent, ReturnToGo(agent.make_env(2, 0), 1.0), 4)
    assert mean >= 1
    with pytest.raises(TypeError, match="is conditioned on a return: pass target_returns"):
        evaluate(agent, episodes=2)


def test_the_target_return_changes_actions(cartpole):
    agent = small_mlp("ReturnConditionedMLP")
    low, high = (agent.predict(conditioned(value))[0] for value in (-3.0, 3.0))
    assert np.abs(low - high).max() > 1e-3


def conditioned(return_to_go):
    return {
        "observation": np.zeros((1, 3), np.float32),
        "return_to_go": np.array([[return_to_go]], np.float32),
        "previous_action": np.zeros((1, 2), np.float32),
        "time_step": np.zeros((1, 1), np.int64),
    }


@pytest.mark.parametrize("kind", [BehaviorCloning, ReturnConditionedMLP])
def test_sb3_eval_callback(cartpole, kind):
    agent = kind(cartpole, **TINY)
    env = agent.make_env(1, 0)
    env = ReturnToGo(env, 1.0) if agent.return_conditioned else env
    callback = EvalCallback(env, n_eval_episodes=2, eval_freq=2, verbose=0)
    agent.learn(2, callback)
    assert np.isfinite(callback.last_mean_reward)
    assert agent.env is None


def test_integral_floats_are_whole_numbers(cartpole):
    agent = BehaviorCloning(cartpole, **TINY | {"batch_size": 8.0, "warmup_updates": np.float64(1e1)})
    assert (agent.batch_size, agent.config.warmup_updates) == (8, 10)
    assert type(agent.config.batch_size) is type(agent.config.warmup_updates) is int


def test_set_env_checks_the_environment(cartpole):
    agent = BehaviorCloning(cartpole, **TINY)
    with pytest.raises(TypeError, match="is not a VecEnv: make one"):
        agent.set_env("CartPole-v1")
    with pytest.raises(DatasetError, match="does not fit dataset"):
        agent.set_env(make_vec_env("Pendulum-v1", 1))
    with pytest.raises(TypeError, match="is not a return-conditioned VecEnv"):
        ReturnConditionedMLP(cartpole, env=make_vec_env("CartPole-v1", 1), **TINY)


def test_agents_are_recorded(cartpole):
    agents = BehaviorCloning(cartpole, context_length=2, **TINY), BehaviorCloning(cartpole, best=0.1, **TINY)
    collect(agents, "CartPole-v1", "test/cloned-v0", 4, n_envs=2)
    data = load_trajectories("test/cloned-v0")
    assert data.episodes == 4
    assert "BehaviorCloning" in data.metadata[0]["algorithm_name"]


def test_callbacks_of_agents_without_an_environment(capsys, cartpole):
    """Neither needs the environment of a training."""
    agent = BehaviorCloning(cartpole, **TINY)
    env = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0), norm_obs=False)
    evaluation = EvaluationCallback(env, episodes=2, every_steps=2)
    agent.learn(4, callback=[evaluation, ProgressBarCallback()])
    assert list(evaluation.reports) == [2, 4]
    assert "4/4" in capsys.readouterr().out
