"""`evaluate`, compared with known returns and with SB3's `evaluate_policy`."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from rlxf import GTrXLPPO
from rlxf.envs import FaultyEnvironmentError, make_vec_env
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.evaluation import evaluate
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent
from tests.evaluation.worlds import (
    Blurred,
    Broken,
    CountAloud,
    Countdown,
    Counter,
    Idle,
    Lottery,
    NextStepReset,
    vec,
)


def test_short_episodes_are_not_overrepresented():
    report = evaluate(Idle(), vec(Countdown(1), Countdown(10)), 8)
    assert sorted(report.lengths) == [1] * 4 + [10] * 4
    assert sorted(report.returns) == [1.0] * 4 + [55.0] * 4


@pytest.mark.parametrize("episodes", [1, 2, 5])
def test_number_of_episodes(episodes):
    report = evaluate(Idle(), vec(Countdown(2), Countdown(3), Countdown(4)), episodes)
    assert report.episodes == episodes


@pytest.mark.parametrize("env", ["CartPole-v1", vec(Countdown(2))], ids=["id", "object"])
@pytest.mark.parametrize("episodes", [2.5, "10", True])
def test_number_of_episodes_must_be_whole(env, episodes):
    with pytest.raises(TypeError, match="episodes must be a whole number, got"):
        evaluate(Idle(), env, episodes)


def test_returns_of_a_monitor_around_a_normalization_are_raw():
    env = VecNormalize(vec(Countdown(4)), norm_obs=False)
    env.ret_rms.var = np.array(100.0)
    assert evaluate(Idle(), VecMonitor(env), 3).returns.tolist() == [10.0] * 3


def test_truncated_episodes_count():
    report = evaluate(Idle(), vec(Countdown(4, truncates=True)), 3)
    assert report.returns.tolist() == [10.0] * 3


def test_state_is_reset_with_each_episode():
    report = evaluate(Counter(), vec(CountAloud(3), CountAloud(7)), 10)
    assert (report.returns == report.lengths).all()


class BatchCounter(Counter):
    """`Counter` that records the batch size of each prediction."""

    def __init__(self):
        self.batches = []

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        assert len(observation) == len(episode_start)
        self.batches.append(len(observation))
        return super().predict(observation, state, episode_start, deterministic)


class Divisible(np.ndarray):
    """State that supports the selection of environments."""

    def rows(self, rows):
        return self[rows.numpy()]


class DivisibleBatchCounter(BatchCounter):
    """`BatchCounter` whose state supports the selection of environments."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        actions, state = super().predict(observation, state, episode_start, deterministic)
        return actions, state.view(Divisible)


def test_finished_environments_are_left_out_of_predictions():
    agent = DivisibleBatchCounter()
    report = evaluate(agent, vec(CountAloud(2), CountAloud(5), CountAloud(9)), 6)
    assert (report.returns == report.lengths).all()
    assert agent.batches == [3] * 4 + [2] * 6 + [1] * 8


def test_indivisible_state_keeps_all_environments():
    agent = BatchCounter()
    report = evaluate(agent, vec(CountAloud(2), CountAloud(5)), 4)
    assert (report.returns == report.lengths).all()
    assert agent.batches == [2] * 10


def test_finished_environments_are_left_out_without_a_state():
    class Stateless(BatchCounter):
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            self.batches.append(len(observation["at"]))
            return observation["at"][:, 0].astype(np.int64), None

    class VisibleTime(CountAloud):
        def __init__(self, length):
            super().__init__(length)
            self.observation_space = spaces.Dict({"at": self.observation_space})

        def look(self):
            return {"at": np.array([self.time], np.float32)}

    agent = Stateless()
    report = evaluate(agent, vec(VisibleTime(2), VisibleTime(5)), 2)
    assert (report.returns == report.lengths).all()
    assert agent.batches == [2] * 2 + [1] * 3


def test_filler_rows_count_neither_in_returns_nor_in_the_state():
    report = evaluate(Counter(), NextStepReset(vec(CountAloud(3), CountAloud(7))), 10)
    assert (report.returns == report.lengths).all()
    assert sorted(set(report.lengths)) == [3, 7]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_gymnasium_vector_environments_with_both_autoreset_modes(mode):
    env = SyncVectorEnv([lambda: CountAloud(3), lambda: CountAloud(7)], autoreset_mode=mode)
    report = evaluate(Counter(), env, 10)
    assert (report.returns == report.lengths).all()
    assert sorted(report.lengths) == [3] * 5 + [7] * 5


def test_a_monitor_that_counts_filler_rows_is_not_used():
    env = as_vec_env(SyncVectorEnv([lambda: CountAloud(3)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    assert evaluate(Counter(), VecMonitor(env), 6).lengths.tolist() == [3] * 6


def test_done_flags_may_be_numbers():
    class NumericDones(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            observations, rewards, dones, infos = self.venv.step_wait()
            return observations, rewards, dones.astype(np.float32), infos

    assert evaluate(Idle(), NumericDones(vec(Countdown(4), Countdown(2))), 4).returns.tolist()
    agent = small_agent(NumericDones(scripts(shifted(2))))
    agent.learn(32)
    assert agent.rollout_buffer.dones.any()


def test_single_gymnasium_environment():
    assert evaluate(Idle(), Countdown(4), 3).returns.tolist() == [10.0] * 3


def test_fewer_episodes_than_environments():
    assert evaluate(Idle(), "CartPole-v1", 3).episodes == 3


def test_environment_of_the_agent():
    agent = PPO("MlpPolicy", vec(Countdown(4)), n_steps=8, batch_size=8, device="cpu")
    assert evaluate(agent, episodes=3).returns.tolist() == [10.0] * 3


def test_success_is_that_of_the_last_step():
    won, lost = Countdown(2, last_info={"is_success": True}), Countdown(2, last_info={"is_success": False})
    report = evaluate(Idle(), vec(won, lost), 6)
    assert report.success_rate == 0.5


def test_missing_success_is_a_failure_if_others_report_it():
    won, unreported = Countdown(2, last_info={"is_success": True}), Countdown(2)
    report = evaluate(Idle(), vec(won, unreported), 4)
    assert report.success_rate == 0.5
    assert evaluate(Idle(), vec(Countdown(2)), 4).success_rate is None


def test_returns_are_those_of_the_monitor():
    """A wrapper outside the monitor that changes rewards does not change the report."""
    scaled = gymnasium.wrappers.TransformReward(Monitor(Countdown(4)), lambda reward: 100 * reward)
    assert evaluate(Idle(), vec(scaled), 2).returns.tolist() == [10.0] * 2
    assert evaluate(Idle(), VecMonitor(vec(Countdown(4))), 2).returns.tolist() == [10.0] * 2


def test_episodes_that_a_wrapper_outside_the_monitor_truncates_count():
    limited = gymnasium.wrappers.TimeLimit(Monitor(Countdown(9)), 4)
    report = evaluate(Idle(), vec(limited), 3)
    assert (report.returns.tolist(), report.lengths.tolist()) == ([10.0] * 3, [4] * 3)


def test_other_wrappers_of_an_evaluation_need_a_normalization_of_their_own():
    """The statistics of single frames do not fit stacked ones."""
    agent = PPO("MlpPolicy", VecFrameStack(VecNormalize(vec(Countdown(4))), 2), n_steps=8, device="cpu")
    with pytest.raises(ValueError, match=r"the outermost wrapper, e.g. VecNormalize\(VecFrameStack"):
        evaluate(agent, VecFrameStack(vec(Countdown(4)), 2), 1)
    own = VecFrameStack(VecNormalize(vec(Countdown(4))), 2)
    assert evaluate(agent, own, 1).returns.tolist() == [10.0]


def test_normalized_images_are_evaluated_in_raw_environments():
    """`VecNormalize` replaces the space of images by one of floats."""

    class Image(Countdown):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (3, 36, 36), np.uint8)

        def look(self):
            return np.full((3, 36, 36), self.time, np.uint8)

    agent = PPO("MlpPolicy", VecNormalize(vec(Image())), n_steps=8, batch_size=8, device="cpu")
    assert evaluate(agent, vec(Image()), 1).returns.tolist() == [6.0]


def test_stacked_frames_with_filler_rows_are_refused():
    env = as_vec_env(SyncVectorEnv([Countdown] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    with pytest.raises(ValueError, match="VecFrameStack mixes the observations of two episodes"):
        evaluate(Idle(), VecFrameStack(env, 2), 1)
    with pytest.raises(ValueError, match=r"autoreset_mode=AutoresetMode\.SAME_STEP"):
        GTrXLPPO("MlpPolicy", VecFrameStack(env, 2))


def test_one_normalization_inside_of_another_is_refused():
    """Statistics of the inner one would be updated, and its scaling would remain in the returns."""
    env = VecMonitor(VecNormalize(VecNormalize(vec(Countdown(4)), norm_obs=False), norm_reward=False))
    for work in (lambda: evaluate(Idle(), env, 1), lambda: GTrXLPPO("MlpPolicy", env)):
        with pytest.raises(ValueError, match=r"use one VecNormalize\(norm_obs=..., norm_reward=...\)"):
            work()


def test_reward_normalization_is_undone_and_statistics_are_not_updated():
    env = VecNormalize(vec(Countdown(4), Countdown(6)))
    mean, count = env.obs_rms.mean.copy(), env.obs_rms.count
    report = evaluate(Idle(), env, 4)
    assert sorted(report.returns) == [10.0, 10.0, 21.0, 21.0]
    assert env.training
    assert (env.obs_rms.mean == mean).all()
    assert env.obs_rms.count == count


def test_statistics_are_updated_again_after_an_error():
    env = VecNormalize(vec(Broken(np.nan)))
    with pytest.raises(ValueError, match="environment 0 at step 2"):
        evaluate(Idle(), env, 1)
    assert env.training


def test_observations_are_normalized_as_in_training():
    train_env = VecNormalize(sb3_make_vec_env("CartPole-v1", 2, seed=0))
    agent = PPO("MlpPolicy", train_env, n_steps=64, batch_size=64, seed=0, device="cpu").learn(256)
    same = VecNormalize(make_vec_env("CartPole-v1", 4), training=False)
    same.obs_rms = train_env.obs_rms
    returns = evaluate(agent, same, 8).returns
    raw = make_vec_env("CartPole-v1", 4)
    assert (evaluate(agent, "CartPole-v1", 8, n_envs=4).returns == returns).all()
    assert (evaluate(agent, raw, 8).returns == returns).all()
    other = VecNormalize(raw, training=False)  # with initial statistics
    assert (evaluate(agent, other, 8).returns != returns).any()


def bare() -> DummyVecEnv:
    return DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 3)


def monitored() -> VecMonitor:
    return VecMonitor(bare())


def normalized() -> VecNormalize:
    return VecNormalize(sb3_make_vec_env("CartPole-v1", 3), training=False)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("kind", "policy"), [(PPO, "MlpPolicy"), (RecurrentPPO, "MlpLstmPolicy")])
@pytest.mark.parametrize("make", [bare, monitored, normalized])
@pytest.mark.filterwarnings("ignore:Evaluation environment is not wrapped")
def test_agrees_with_sb3(kind, policy, make):
    agent = kind(policy, "CartPole-v1", n_steps=32, batch_size=32, seed=0, device="cpu")
    env = make()
    env.seed(5)
    returns, lengths = evaluate_policy(agent, env, 10, return_episode_rewards=True)
    report = evaluate(agent, env, 10, seed=5)
    assert report.returns.tolist() == pytest.approx(returns)
    assert report.lengths.tolist() == lengths


def test_seed_determines_the_episodes():
    def returns(seed):
        return evaluate(Idle(), vec(Lottery(), Lottery()), 6, seed=seed).returns

    assert (returns(1) == returns(1)).all()
    assert (returns(1) != returns(2)).all()


def test_a_seed_of_numpy_equals_one_of_python():
    def returns(seed):
        return evaluate(Idle(), Lottery(), 4, seed=seed).returns.tolist()

    assert returns(np.int64(3)) == returns(3) != returns(4)


def test_seed_none_keeps_the_seeds_of_the_environments():
    def returns():
        env = vec(Lottery())
        env.seed(3)
        return evaluate(Idle(), env, 4, seed=None).returns

    assert (returns() == returns()).all()


def test_logs_at_the_agents_step(tmp_path):
    agent = PPO("MlpPolicy", vec(Countdown(4)), n_steps=8, batch_size=8, device="cpu").learn(16)
    logger = configure(str(tmp_path), ["csv"])
    evaluate(agent, Countdown(4), 2, logger=logger)
    logger.close()
    names, row = (tmp_path / "progress.csv").read_text().splitlines()
    logged = dict(zip(names.split(","), row.split(","), strict=True))
    assert float(logged["eval/mean_reward"]) == 10.0
    assert int(logged["time/total_timesteps"]) == 16


def test_progress_bar_counts_episodes(capsys):
    evaluate(Idle(), vec(Countdown(1)), 7, progress_bar=True)
    assert "7/7" in capsys.readouterr().out
    evaluate(Idle(), vec(Countdown(1)), 7)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("given", [{"episodes": 0}, {"episodes": -3}, {"n_envs": 0}])
def test_arguments_less_than_one_raise(given):
    name, value = next(iter(given.items()))
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        evaluate(Idle(), "CartPole-v1", **given)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("step", [0, 2])
def test_non_finite_observation_raises_with_environment_and_step(value, step):
    message = f"observation of environment 1 is not finite at its step {step}: {value}"
    with pytest.raises(FaultyEnvironmentError, match=message):
        evaluate(Idle(), vec(Countdown(), Blurred(value, step)), 4)


def test_missing_environment_raises():
    with pytest.raises(ValueError, match="Idle has no environment"):
        evaluate(Idle())


def test_other_objects_as_env_raise():
    with pytest.raises(TypeError, match="env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got 7"):
        evaluate(Idle(), 7)


def test_agent_without_predict_raises():
    with pytest.raises(TypeError, match="predict"):
        evaluate(object(), "CartPole-v1")
