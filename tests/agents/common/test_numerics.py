"""NaN, infinity and invalid results from any source reach no weight, and the error names their source."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import DecisionTransformer, evaluate
from rlxf.agents.common.environment_checks import check_observations, check_step_results
from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.agents.gtrxl.rollout_collector import RolloutCollector
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.data import DatasetError
from rlxf.envs import FaultyEnvironmentError
from rlxf.training import NumericalError
from rlxf.training.states import optimizer_tensors
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online
from tests.agents.gtrxl.worlds import VECTOR, Scripted, same
from tests.envs.test_step_checks import Choosing


@pytest.fixture
def env():
    return DummyVecEnv([Choosing] * 2)


@pytest.mark.parametrize("dones", [[None, False], [None, None], ["no", "no"], [[], False]], ids=str)
def test_dones_that_are_not_numbers_are_rejected(env, dones):
    ends = np.empty(2, object)
    ends[:] = dones
    with pytest.raises(FaultyEnvironmentError, match="dones at step 3 must be True or False, got"):
        check_step_results(env, np.zeros(2, int), np.zeros(2), ends, 3)


@pytest.mark.parametrize("kind", [bool, np.int64, np.float32, np.uint8])
def test_dones_may_be_numbers(env, kind):
    check_step_results(env, np.zeros(2, int), np.zeros(2), np.array([True, False]).astype(kind), 3)


@pytest.mark.parametrize(
    ("rewards", "dones", "message"),
    [
        (
            np.zeros((2, 1)),
            np.zeros(2, bool),
            r"rewards at step 3 must be .* shape \(2,\), got shape \(2, 1\)",
        ),
        (np.zeros(2), np.zeros((2, 1), bool), r"dones at step 3 must be .* shape \(2,\), got shape \(2, 1\)"),
        (
            np.array([0, 1e39]),
            np.zeros(2, bool),
            "float32 reward of environment 1 is not finite at its step 3",
        ),
    ],
)
def test_rewards_and_dones_that_do_not_fit_the_rollout_are_rejected(env, rewards, dones, message):
    with pytest.raises(FaultyEnvironmentError, match=message):
        check_step_results(env, np.zeros(2, int), rewards, dones, 3)


@pytest.mark.parametrize(
    ("space", "values", "message"),
    [
        (spaces.Discrete(3), np.array([0, 7]), "holds 7"),
        (spaces.Discrete(3), np.array([0, -1]), "holds -1"),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [0, 3]]), "holds 3"),
        (spaces.MultiBinary(2), np.array([[1, 0], [0, 2]]), "holds 2"),
        (spaces.Dict(a=spaces.Discrete(3)), {"a": np.array([3, 0])}, "holds 3"),
    ],
    ids=str,
)
def test_invalid_choice_in_a_batch_is_rejected(env, space, values, message):
    with pytest.raises(FaultyEnvironmentError, match=f"{message}, which is not in its space"):
        check_step_results(env, values, np.zeros(2), np.zeros(2, bool), 3, space=space)
    with pytest.raises(FaultyEnvironmentError, match=f"{message}, which is not in its space"):
        check_observations("first observation", env, values, 0, space=space)


WHOLE = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "values", "message"),
    [
        (WHOLE, np.array([[0, 255], [0.5, 1]]), "of float64, and 0.5 cannot be stored as uint8"),
        (WHOLE, np.array([[0, 256], [1, 1]]), "of int64, and 256 cannot"),
        (WHOLE, np.array([[0, 1], [-1, 1]], np.int8), "of int8, and -1 cannot"),
        (spaces.Dict(a=WHOLE), {"a": np.full((2, 2), 0.5, np.float32)}, "of float32, and 0.5 cannot"),
    ],
    ids=str,
)
def test_observations_that_their_dtype_would_change_are_rejected(env, space, values, message):
    """A rollout is stored in the dtype of the space, so the update would get other values than the agent."""
    with pytest.raises(FaultyEnvironmentError, match=rf"observations at step 3 are {message}"):
        check_step_results(env, values, np.zeros(2), np.zeros(2, bool), 3, space=space)


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (WHOLE, np.array([[0.0, 255.0], [3.0, 1.0]])),
        (WHOLE, np.array([[0, 255], [3, 1]])),
        (spaces.Box(-1, 1, (2,), np.float32), np.array([[0.1, 0.2], [0.3, -1]])),
        (spaces.Discrete(3), np.array([0.0, 2.0])),
    ],
    ids=str,
)
def test_observations_of_another_dtype_are_accepted(env, space, values):
    check_step_results(env, values, np.zeros(2), np.zeros(2, bool), 3, space=space)


def test_normalized_observations_of_integers_are_accepted():
    env = VecNormalize(DummyVecEnv([lambda: Scripted((0,), WHOLE)] * 2))
    check_observations("first observation", env, env.reset(), 0)


pytestmark = pytest.mark.faults
VALUES = [np.nan, np.inf]
TRUNCATED_AT_21 = (0,) * 20 + (2,) + (0,) * 20
ENDED_AT_5 = (0,) * 4 + (1,)


class Switched(Scripted):
    """Environment that inserts ``fault.value`` at ``fault.place`` once enabled."""

    def __init__(self, fault, ends):
        super().__init__(ends, VECTOR, online.ACTIONS["Box"])
        self.fault = fault

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self.spoil("first", obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        due = self.life >= self.fault.life
        obs = self.spoil("observation", obs, due)
        obs = self.spoil("last", obs, truncated)
        if self.fault.place == "reward" or (self.fault.place == "last reward" and terminated):
            reward = self.fault.value if due else reward
        return obs, reward, terminated, truncated, info

    def spoil(self, place, obs, due=True):
        if self.fault.place == place and due:
            obs[1] = self.fault.value
        return obs


def switched(ends=(0,), life=20):
    """Return three environments, of which the second has a fault that can be enabled."""
    fault = SimpleNamespace(place=None, value=None, life=life)
    none = SimpleNamespace(place=None, life=life)
    faults = [none, fault, none]
    return DummyVecEnv([lambda f=f: Switched(f, ends) for f in faults]), fault


def kept(model, optimizer):
    """Return copies of the weights and the optimizer state."""
    return [x.detach().clone() for x in (*model.parameters(), *optimizer_tensors(optimizer).values())]


def spoiled(value):
    """Return a hook that replaces one number of a tensor by ``value``."""

    def hook(*given):
        x = given[-1].clone()
        x.view(-1)[0] = value
        return x

    return hook


def statistics(env):
    parts = [env.obs_rms.mean, env.obs_rms.var, env.obs_rms.count, env.ret_rms.mean, env.ret_rms.var]
    return [np.array(part).tolist() for part in parts]


def in_acting(agent, value):
    """Replace the value of environment 1 while acting."""

    def hook(module, given, output):
        if module.training:
            return output
        output = output.clone()
        output[1] = value
        return output

    agent.policy.value_net.register_forward_hook(hook)


def in_critic(agent, value):
    def hook(module, given, output):
        return output * value if module.training else output

    agent.policy.value_net.register_forward_hook(hook)


ONLINE = {
    "first observation": (FaultyEnvironmentError, "first observation of environment 1 .* step"),
    "observation": (FaultyEnvironmentError, "observation of environment 1 is not finite at its step 20"),
    "reward": (FaultyEnvironmentError, "reward of environment 1 is not finite at its step 20"),
    "last observation": (FaultyEnvironmentError, "last observation of environment 1 .* its step 21"),
    "value": (NumericalError, "the update after step 96: the .* of environment 1 is .* at step "),
    "return": (NumericalError, "the update after step 96: the .* of environment 1 is .* at step 3 "),
    "loss": (NumericalError, "the update after step 96: the loss is .*value_loss is"),
    "gradient": (NumericalError, "the update after step 96: the gradient of transformer.* contains"),
}


def inject_online(agent, fault, place, value, monkeypatch):
    if place == "loss":
        in_critic(agent, value)
    elif place == "value":
        in_acting(agent, value)
    elif place == "gradient":
        agent.policy.transformer.get_parameter(name_of_one(agent.policy.transformer)).register_hook(
            spoiled(value)
        )
    elif place == "return":
        finish = RolloutCollector.finish_rollout

        def spoil(collector, *given):
            finish(collector, *given)
            collector.buffer.returns[1, 3] = value

        monkeypatch.setattr(RolloutCollector, "finish_rollout", spoil)
    else:
        fault.place, fault.value = place.removesuffix(" observation"), value


def name_of_one(module):
    """Return the name of the fourth parameter."""
    return [name for name, _ in module.named_parameters()][3]


@pytest.mark.parametrize(
    ("place", "value", "normalized"),
    [
        case
        for case in itertools.product(ONLINE, VALUES, [False, True])
        if case != ("last observation", np.inf, True)  # VecNormalize makes it finite
    ],
)
def test_nonfinite_values_of_gtrxl(place, value, normalized, monkeypatch):
    env, fault = switched(TRUNCATED_AT_21)
    env = VecNormalize(env) if normalized else env
    agent = online.small_agent(env).learn(3 * 16)
    optimizer = agent.policy.optimizer
    before, seen = kept(agent.policy, optimizer), statistics(env) if normalized else None
    value_net = copy.deepcopy(agent.policy.value_net.state_dict())
    inject_online(agent, fault, place, value, monkeypatch)
    error, message = ONLINE[place]
    with pytest.raises(error, match=message):
        agent.learn(3 * 16, reset_num_timesteps=place == "first observation")
    if place in ("loss", "gradient"):  # the value head was rescaled to the returns: values are what they were
        agent.policy.value_net.load_state_dict(value_net)
    assert same(kept(agent.policy, optimizer), before)
    if normalized and error is FaultyEnvironmentError:
        assert statistics(env) == seen


OFFLINE = {
    "observation": "update 3: the tokens of the transformer are not finite in row .*in: observations",
    "action": "update 3: the tokens of the transformer are not finite in row .*in: actions",
    "loss": "update 3: the loss is",
    "gradient": "update 3: the gradient of transformer.* contains",
}


def inject_offline(agent, place, value, monkeypatch):
    if place == "gradient":
        agent.policy.transformer.get_parameter(name_of_one(agent.policy.transformer)).register_hook(
            spoiled(value)
        )
    elif place == "loss":
        losses = agent.policy.losses
        monkeypatch.setattr(agent.policy, "losses", lambda b: {k: x * value for k, x in losses(b).items()})
    else:
        getattr(agent.trajectories, f"{place}s")[:, 0] = value


def fresh_pretraining():
    core = offline.decision_transformer(width=16, layers=2, heads=2, dropout=0.0)
    return MaskedPretraining(
        offline.some_trajectories(), 5, batch_size=8, core=core, seed=3, device="cpu", mask_probability=0.5
    )


@pytest.mark.parametrize("made", [offline.small_agent, fresh_pretraining], ids=["dt", "pretraining"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", OFFLINE)
def test_nonfinite_values_of_offline_training(place, value, made, monkeypatch):
    agent = made().learn(2)
    before = kept(agent.policy, agent.optimizer)
    inject_offline(agent, place, value, monkeypatch)
    with pytest.raises(NumericalError, match=OFFLINE[place]):
        agent.learn(2, reset_num_timesteps=False)
    assert same(kept(agent.policy, agent.optimizer), before)


@pytest.mark.parametrize("value", VALUES)
def test_nonfinite_rewards_in_data(value):
    data = offline.some_trajectories()
    data.return_to_go[7] = value
    with pytest.raises(DatasetError, match="return to go of step 7 of the trajectories is"):
        DecisionTransformer(data)


@pytest.mark.parametrize("value", VALUES)
def test_nonfinite_dual_variable(value):
    agent = offline.small_agent(objective=MaximumEntropy()).learn(2)
    before = kept(agent.policy, agent.optimizer)
    agent.policy.loss.log_temperature.register_hook(spoiled(value))
    with pytest.raises(NumericalError, match=r"gradient of loss\.log_temperature"):
        agent.learn(2, reset_num_timesteps=False)
    assert same(kept(agent.policy, agent.optimizer), before)


PLAYED = {
    "first": "first observation of environment 1 is not finite at its step 0",
    "observation": "observation of environment 1 is not finite at its step 3",
    "reward": "reward of environment 1 is not finite at its step 3",
    "last reward": "reward of environment 1 is not finite at its step 5",
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLAYED)
def test_nonfinite_values_of_online_decision_transformer(place, value):
    env, fault = switched(ENDED_AT_5, life=3)
    fault.place, fault.value = place, value
    data = offline.some_trajectories(VECTOR, online.ACTIONS["Box"])
    agent = offline.small_agent(data, objective=MaximumEntropy()).learn(2)
    before = kept(agent.policy, agent.optimizer)
    with pytest.raises(FaultyEnvironmentError, match=PLAYED[place]):
        agent.learn_online(30, 1.0, env=env, round_steps=30, round_updates=2)
    assert same(kept(agent.policy, agent.optimizer), before)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", ["first", "observation", "reward"])
def test_nonfinite_values_in_evaluation(place, value):
    env, fault = switched(ENDED_AT_5, life=3)
    data = offline.some_trajectories(VECTOR, online.ACTIONS["Box"])
    agent = offline.small_agent(data).learn(2)
    before = kept(agent.policy, agent.optimizer)
    fault.place, fault.value = place, value
    with pytest.raises(FaultyEnvironmentError, match=r"(observation|reward).*environment 1"):
        evaluate(agent, env, 3, target_returns=[1.0])
    assert same(kept(agent.policy, agent.optimizer), before)
