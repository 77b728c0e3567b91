"""Value head: normalization preserves values, and the critic learns returns of any scale."""

import copy
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from rlxf import GTrXLPPO
from rlxf.agents.gtrxl.config import PPOConfig
from rlxf.agents.gtrxl.value_head import MAX_GROWTH, MIN_RATE, MIN_STD, PopArtHead
from rlxf.training import CheckpointError
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent, small_core


def head(seed: int = 0) -> PopArtHead:
    torch.manual_seed(seed)
    return PopArtHead(8)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
def test_updating_statistics_preserves_values(scale):
    value_head, latent = head(), torch.randn(64, 8)
    for rollout in range(30):
        before = value_head(latent)
        value_head.update(scale * (torch.randn(256) * (1 + rollout) - 3 * rollout))
        torch.testing.assert_close(value_head(latent), before, rtol=1e-4, atol=1e-5 * scale)


def test_the_first_twenty_rollouts_count_equally():
    value_head, returns = head(), [torch.randn(100) * n + 10 * n for n in range(1, 21)]
    for each in returns:
        value_head.update(each)
    everything = torch.cat(returns).double()
    torch.testing.assert_close(value_head.mean, everything.mean())
    torch.testing.assert_close(value_head.variance, everything.var(correction=0))


def test_early_returns_lose_influence_on_scale():
    value_head = head()
    for _ in range(20):
        value_head.update(1e4 * torch.randn(100))
    for _ in range(400):
        value_head.update(torch.randn(100) + 5)
    assert value_head.mean.item() == pytest.approx(5, abs=0.5)
    assert value_head.deviation.item() == pytest.approx(1, abs=0.5)


def settled_head(scale: float = 1.0) -> PopArtHead:
    """Return a head after 50 rollouts with returns of this size."""
    value_head = head()
    for _ in range(50):
        value_head.update(scale * torch.randn(1000))
    return value_head


@pytest.mark.parametrize("outlier", [1e5, -1e9, 1e30])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
@pytest.mark.parametrize("steps", [1, 200, 1000])
def test_the_influence_of_an_outlier_on_the_scale_is_bounded(steps, scale, outlier):
    """Its reward is part of the returns of all earlier steps whose lambda returns reach it."""
    value_head = settled_head(scale)
    before, returns = value_head.deviation, scale * torch.randn(1000)
    returns[:steps] += scale * outlier
    value_head.update(returns)
    bound = MAX_GROWTH * math.sqrt(MIN_RATE * steps / len(returns))
    assert before < value_head.deviation < (2 + 1.1 * bound) * before
    assert value_head.mean.abs() < (1 + 1.1 * MAX_GROWTH * MIN_RATE * steps / len(returns)) * before


def test_returns_up_to_the_largest_so_far_count_in_full():
    """A sparse reward that is found again after a long time is no outlier."""
    value_head, sparse = head(), 1000 * torch.eye(1000)[0]
    value_head.update(sparse)
    for _ in range(600):
        value_head.update(torch.zeros(1000))
    assert value_head.deviation < 0.1
    value_head.update(sparse)
    assert value_head.deviation.item() == pytest.approx(1000 * math.sqrt(0.05 / 1000), rel=0.1)


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_much_larger_rewards_set_the_scale_after_few_rollouts(shift):
    value_head = settled_head()
    for _ in range(10):
        value_head.update(1e5 * torch.randn(1000) + shift)
    assert value_head.deviation > 5e4
    assert value_head.mean >= 0.2 * shift - 1e4


def test_returns_without_variance_do_not_divide_by_zero():
    value_head = head()
    for _ in range(50):
        value_head.update(torch.zeros(100))
    assert value_head.deviation.item() == MIN_STD
    assert value_head(torch.randn(4, 8)).isfinite().all()


def new_head() -> PopArtHead:
    """Return the head of a new agent, whose weights are 0."""
    value_head = head()
    for parameter in value_head.parameters():
        torch.nn.init.zeros_(parameter)
    return value_head


@pytest.mark.parametrize("reward", [1e-6, 1.0, 1e6, -1e-6])
def test_a_single_reward_after_rollouts_without_rewards(reward):
    value_head, latent = new_head(), torch.randn(4, 8)
    for _ in range(50):
        value_head.update(torch.zeros(100))
        assert not value_head(latent).any()
    value_head.update(reward * torch.eye(100)[0])
    assert value_head.deviation > 1e-3 * abs(reward)
    torch.testing.assert_close(value_head(latent), value_head.mean.float().expand(4, 1))
    for _ in range(1000):
        value_head.update(torch.zeros(100))
    assert value_head.deviation == pytest.approx(MIN_STD * min(1, abs(reward)))


@pytest.mark.parametrize("returns", [1e-6, 1.0, 1e6])
def test_first_values_are_equal_returns(returns):
    value_head = new_head()
    value_head.update(torch.full((100,), returns))
    torch.testing.assert_close(value_head(torch.randn(4, 8)), torch.full((4, 1), returns))


class Scaled(VecEnvWrapper):
    """Environments whose rewards are multiplied by a factor."""

    def __init__(self, venv: VecEnv, factor: float):
        super().__init__(venv)
        self.factor = factor

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        return obs, self.factor * rewards, dones, infos


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**-10, 2.0**20], ids=str)
def test_training_does_not_depend_on_the_unit_of_rewards(factor):
    """Powers of two change no mantissa, so training is equal up to a constant of 1e-8."""

    def trained(factor: float) -> dict[str, torch.Tensor]:
        env = Scaled(scripts(shifted(4)), factor)
        agent = small_agent(env, loud=False, clip_range_vf=0.5, gae_lambda=0.95).learn(6 * 64)
        return {name: x.detach() for name, x in agent.policy.named_parameters()}

    torch.testing.assert_close(trained(factor), trained(1.0), rtol=0, atol=1e-3)


class WithOutlier(Scaled):
    """Environments whose reward is ``factor`` in one step of the first of them."""

    steps = 0

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        self.steps += 1
        if self.steps == 60:
            rewards[0] = self.factor
        return obs, rewards, dones, infos


def test_a_training_continues_on_its_scale_after_an_outlier():
    agent = small_agent(WithOutlier(scripts(shifted(4)), 1e12), loud=False).learn(6 * 64)
    assert agent.policy.value_net.deviation < 20
    assert agent.rollout_buffer.values.abs().max() < 1000


@pytest.mark.parametrize("factor", [1e-37, 1e-25, 1e-20])
def test_tiny_rewards_end_no_training(factor):
    """Their squares are 0 in float32, and the value loss in units of the returns must not become NaN."""
    small_agent(Scaled(scripts(shifted(4)), factor), loud=False).learn(3 * 64)


@pytest.mark.parametrize(("scale", "shift"), [(1e3, 0.0), (1.0, -1e3), (1e-1, 5.0)])
def test_gradient_of_transformer_is_scale_invariant(scale, shift):
    returns, latent = torch.randn(256, dtype=torch.float64), torch.randn(256, 8, dtype=torch.float64)

    def gradient(returns: torch.Tensor) -> torch.Tensor:
        value_head, inputs = head().double(), latent.clone().requires_grad_()
        value_head.update(returns)
        with torch.no_grad():  # the same normalized values
            value_head.weight.copy_(torch.linspace(-1, 1, 8)[None])
            value_head.bias.zero_()
        error = (returns - value_head(inputs)[:, 0]) / value_head.deviation
        error.square().mean().backward()
        assert inputs.grad is not None
        return inputs.grad

    torch.testing.assert_close(gradient(scale * returns + shift), gradient(returns))


class Countdown(gymnasium.Env):
    """Episodes of ten steps that show the number of remaining steps; each step gives ``reward``."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward: float):
        self.reward, self.left = reward, 10

    def _shown(self) -> np.ndarray:
        return np.array([self.left / 10], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = 10
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._shown(), self.reward, self.left == 0, False, {}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("reward", [1e-6, -1000.0, 1.0, 1e4])
def test_the_critic_learns_returns_of_any_scale(reward):
    env = DummyVecEnv([lambda: Countdown(reward)] * 8)
    agent = GTrXLPPO(
        "MlpGTrXLPolicy",
        env,
        core=small_core(layers=1),
        segment_length=8,
        n_steps=32,
        batch_size=64,
        n_epochs=4,
        learning_rate=1e-2,
        seed=0,
        device="cpu",
    )
    agent.learn(8 * 8 * 32)
    assert agent.logger.name_to_value["train/explained_variance"] > 0.8


def test_statistics_are_saved(tmp_path):
    env = scripts(shifted(4))
    agent = GTrXLPPO(
        "MlpGTrXLPolicy", env, core=small_core(), segment_length=8, n_steps=16, batch_size=32, seed=0
    )
    agent.learn(256)
    agent.save(tmp_path / "agent.zip")
    loaded = GTrXLPPO.load(tmp_path / "agent.zip")
    for name, value in agent.policy.value_net.state_dict().items():
        assert torch.equal(loaded.policy.value_net.state_dict()[name], value), name
    assert loaded.policy.value_net.rollouts == 4
    latent = torch.randn(5, 16)
    assert torch.equal(loaded.policy.value_net(latent), copy.deepcopy(agent.policy.value_net)(latent))


@pytest.mark.parametrize("name", ["variance", "rollouts"])
def test_invalid_statistics_are_rejected(tmp_path, name):
    agent = GTrXLPPO("MlpGTrXLPolicy", Countdown(1.0), core=small_core())
    getattr(agent.policy.value_net, name).fill_(-1)
    agent.save(tmp_path / "agent.zip")
    with pytest.raises(CheckpointError, match=f"value_net.{name} must be at least 0, got -1"):
        GTrXLPPO.load(tmp_path / "agent.zip")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize("name", ["mean", "variance"])
def test_statistics_that_overflow_are_rejected(tmp_path, name, value):
    agent = GTrXLPPO("MlpGTrXLPolicy", Countdown(1.0), core=small_core())
    getattr(agent.policy.value_net, name).fill_(value)
    agent.save(tmp_path / "agent.zip")
    with pytest.raises(CheckpointError, match=f"value_net.{name}"):
        GTrXLPPO.load(tmp_path / "agent.zip")


@pytest.mark.parametrize(
    ("n_envs", "segment_length", "n_steps"),
    [(1, 64, 2048), (32, 64, 64), (8, 64, 256), (256, 64, 64), (3, 16, 688)],
)
def test_a_rollout_has_at_least_2048_steps_by_default(n_envs, segment_length, n_steps):
    env = DummyVecEnv([lambda: Countdown(1.0)] * n_envs)
    assert PPOConfig(segment_length=segment_length).steps_per_env(env) == n_steps


def test_a_loaded_agent_has_the_default_rollout_of_its_environments(tmp_path):
    def load(chosen, **changes):
        env = DummyVecEnv([lambda: Countdown(1.0)] * 32)
        GTrXLPPO("MlpGTrXLPolicy", env, core=small_core(), n_steps=chosen).save(tmp_path / "agent")
        return GTrXLPPO.load(tmp_path / "agent", **changes).n_steps

    assert load(None, env=Countdown(1.0)) == 2048
    assert load(128, env=Countdown(1.0)) == 128
    assert load(None, env=Countdown(1.0), n_steps=64) == load(None) == 64


def test_default_rollout_of_one_environment():
    agent = GTrXLPPO("MlpGTrXLPolicy", Countdown(1.0), core=small_core())
    assert agent.n_steps == 2048
    assert agent.n_steps >= agent.batch_size
