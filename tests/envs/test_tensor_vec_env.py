"""Tests of vector environments of tensors as a ``VecEnv``, and of the checks of their tensors."""

from collections import UserDict
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import NumpyToTorch, TransformReward
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs import (
    FaultyEnvironmentError,
    GymnasiumVecEnv,
    TensorVecEnv,
    TMazeTensor,
    TMazeVector,
    as_vec_env,
)
from rlxf.envs.filler_rows import has_filler_rows
from rlxf.envs.tensor_checks import TensorChecks, _limits
from rlxf.envs.tensor_step import SparseInfos
from tests.agents.gtrxl.worlds import ACTIONS, DICT, VECTOR, Scripted, shifted
from tests.envs.tensor_envs import ArrayConversion, Overwriting, Tensors, needs_array_conversion

MODES = list(AutoresetMode)


def scripted(mode: AutoresetMode, observation_space: spaces.Space = VECTOR) -> SyncVectorEnv:
    makes = [partial(Scripted, script, observation_space, ACTIONS["Discrete"]) for script in shifted(3)]
    return SyncVectorEnv(makes, autoreset_mode=mode)


def without_time(info: dict[str, Any]) -> dict[str, Any]:
    episode = info.get("episode")
    return info if episode is None else info | {"episode": (episode["r"], episode["l"])}


def played(env: VecEnv, steps: int = 30) -> list[Any]:
    env.seed(1)
    results: list[Any] = [env.reset()]
    for step in range(steps):
        obs, rewards, dones, infos = env.step(np.full(env.num_envs, step % 3))
        results.append((obs, rewards, dones, [without_time(info) for info in infos]))
    return results


@pytest.mark.parametrize("observation_space", [VECTOR, DICT], ids=["Box", "Dict"])
@pytest.mark.parametrize("mode", MODES)
def test_arrays_equal_those_of_the_environment_without_tensors(mode, observation_space):
    wrapped = as_vec_env(Tensors(scripted(mode, observation_space)))
    assert isinstance(wrapped, TensorVecEnv)
    expected = played(as_vec_env(scripted(mode, observation_space)))
    np.testing.assert_equal(played(wrapped), expected)
    assert any("episode" in info for *_, infos in expected[1:] for info in infos)
    assert has_filler_rows(wrapped) == (mode is AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_change_if_the_environment_overwrites_its_tensors(mode):
    np.testing.assert_equal(
        played(as_vec_env(Overwriting(scripted(mode)))), played(as_vec_env(scripted(mode)))
    )


class NanResets(VectorWrapper):
    """Environment whose reset steps have a NaN as reward."""

    ended = False

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        rewards, self.ended = np.where(self.ended, np.nan, rewards), terminated | truncated
        return observations, rewards, terminated, truncated, infos


def test_rewards_of_reset_steps_are_not_checked():
    env = as_vec_env(Tensors(NanResets(scripted(AutoresetMode.NEXT_STEP))))
    env.reset()
    steps = [env.step_tensors(torch.ones(env.num_envs, dtype=torch.int64)) for _ in range(40)]
    assert all(step.valid for step in steps)
    assert any(step.filler_next.any() for step in steps)


@pytest.mark.parametrize("convert", [lambda env: env, Tensors], ids=["arrays", "tensors"])
def test_reset_steps_have_no_reward(convert):
    """Also if a wrapper of the vector environment changes it, as environments of Gymnasium with jax do."""
    env = as_vec_env(convert(TransformReward(scripted(AutoresetMode.NEXT_STEP), lambda reward: reward + 1)))
    env.seed(0)
    env.reset()
    sums, fillers = np.zeros(env.num_envs), 0
    for _ in range(40):
        _, rewards, ends, infos = env.step(np.ones(env.num_envs, np.int64))
        sums += rewards
        filler = [info.get("filler", False) for info in infos]
        assert not rewards[filler].any()
        fillers += sum(filler)
        for i in np.flatnonzero(ends):
            assert infos[i]["episode"]["r"] == pytest.approx(sums[i], abs=1e-5)  # of float32 rewards
        sums[ends] = 0
    assert fillers > 0


class AlwaysOne:
    """Agent that always takes action 1."""

    def predict(self, observation: Any, *others: Any, **options: Any) -> tuple[Any, None]:
        return np.ones(len(observation), dtype=np.int64), None


def test_evaluation_of_stable_baselines3_gives_the_same_returns():
    scores = []
    for env in (Tensors(scripted(AutoresetMode.SAME_STEP)), scripted(AutoresetMode.SAME_STEP)):
        vec_env = as_vec_env(env)
        vec_env.seed(0)
        scores.append(evaluate_policy(AlwaysOne(), vec_env, 6, return_episode_rewards=True))
    assert scores[0] == scores[1]


def test_environments_with_a_device_are_recognized():
    make = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    assert type(as_vec_env(make())) is GymnasiumVecEnv
    assert type(as_vec_env(NumpyToTorch(make()))) is TensorVecEnv
    assert type(as_vec_env(TransformReward(NumpyToTorch(make()), lambda reward: reward / 2))) is TensorVecEnv


@needs_array_conversion
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_tensors_converted_to_numpy_are_arrays(mode):
    """A conversion to NumPy is an array environment, although the environment inside has a device."""
    tensors = TMazeTensor(2, 2, autoreset_mode=mode, device="cpu")
    wrapped = as_vec_env(ArrayConversion(tensors, env_xp=torch, target_xp=np))
    assert type(wrapped) is GymnasiumVecEnv
    expected = played(as_vec_env(TMazeVector(2, 2, autoreset_mode=mode)))
    np.testing.assert_equal(played(wrapped), expected)


@needs_array_conversion
def test_arrays_converted_to_torch_are_tensors():
    """A conversion declares its device as ``target_device``, else it is that of the environment inside."""
    import array_api_compat.torch

    arrays, tensors = TMazeVector(2), TMazeTensor(2, device="cpu")
    converted = {
        "cpu": ArrayConversion(arrays, np, torch),
        "meta": ArrayConversion(arrays, np, torch, target_device="meta"),
    }
    for device, env in converted.items():
        assert as_vec_env(env).device == torch.device(device)
    tensors.device = torch.device("meta")
    for library in (torch, array_api_compat.torch):
        assert as_vec_env(ArrayConversion(tensors, library, library)).device == torch.device("meta")
    assert type(as_vec_env(ArrayConversion(NumpyToTorch(arrays), torch, np))) is GymnasiumVecEnv


class Arrays(VectorWrapper):
    """Vector environment of tensors that takes and returns arrays."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observations, infos = self.env.reset(seed=seed, options=options)
        return observations.numpy(), infos

    def step(self, actions: Any) -> Any:
        *results, infos = self.env.step(torch.from_numpy(actions))
        return *(x.numpy() for x in results), {name: x.numpy() for name, x in infos.items()}


def test_arrays_of_another_wrapper_are_reported_with_a_remedy():
    env = Arrays(TMazeTensor(2, 2, autoreset_mode="NextStep", device="cpu"))
    with pytest.raises(
        FaultyEnvironmentError, match=r"returns NumPy arrays.*rlxf\.envs\.GymnasiumVecEnv\(env\)"
    ):
        as_vec_env(env).reset()
    expected = played(as_vec_env(TMazeVector(2, 2, autoreset_mode="NextStep")))
    np.testing.assert_equal(played(GymnasiumVecEnv(env)), expected)


def test_missing_device_is_reported_at_the_first_reset(monkeypatch):
    monkeypatch.delattr(Tensors, "device")
    env = as_vec_env(Tensors(scripted(AutoresetMode.NEXT_STEP)))
    with pytest.raises(FaultyEnvironmentError, match="returns tensors, but has no attribute 'device'"):
        env.reset()


NUMBERS = spaces.Dict(
    {
        "vector": spaces.Box(-1, 1, (2,), np.float32),
        "choice": spaces.Discrete(3),
        "any": spaces.Box(-np.inf, np.inf, (1,)),
    }
)


class Constant(VectorEnv):
    """Two environments with the same results in each step, of which some are replaced."""

    device = "cpu"

    def __init__(self, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **results: Any):
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.results = 2, results
        self.single_observation_space, self.single_action_space = NUMBERS, spaces.Discrete(2)
        self.observation_space, self.action_space = (
            batch_space(space, 2) for space in (NUMBERS, self.single_action_space)
        )
        self.started = False

    def observations(self) -> Any:
        made = {
            "vector": torch.zeros(2, 2),
            "choice": torch.ones(2, dtype=torch.long),
            "any": torch.zeros(2, 1),
        }
        return {
            key: self.results.get(key, x) for key, x in made.items() if self.results.get(key, x) is not None
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.observations() if self.started else Constant().observations(), {}

    def step(self, actions: Any) -> Any:
        never = torch.zeros(2, dtype=torch.bool)
        get = self.results.get
        flags = get("terminated", never), get("truncated", never)
        return self.observations(), get("rewards", torch.zeros(2)), *flags, get("infos", {})


FAULTS = {
    r"observations 'vector'.*a torch.float32 tensor.*2, 2.*on cpu, got a torch.float32 tensor.*\(2, 3\)": {
        "vector": torch.zeros(2, 3)
    },
    "observations 'vector'.*on cpu, got a torch.float32 tensor of shape.*on meta": {
        "vector": torch.zeros(2, 2, device="meta")
    },
    "observations 'choice'.*a torch.int64 tensor.*got a torch.float32": {"choice": torch.zeros(2)},
    "observations 'vector'.*got ndarray of shape": {"vector": np.zeros((2, 2))},
    "observations.*dict with the entry 'choice', got dict": {"choice": None},
    "rewards.*a real tensor of shape.*got a torch.float32 tensor of shape.*2, 1": {
        "rewards": torch.zeros(2, 1)
    },
    "rewards.*got a torch.complex64": {"rewards": torch.zeros(2, dtype=torch.complex64)},
    "rewards.*got list": {"rewards": [0.0, 0.0]},
    "terminations.*a bool tensor.*got a torch.float32": {"terminated": torch.zeros(2)},
    "truncations.*got bool": {"truncated": False},
    "SAME_STEP but no infos": {
        "terminated": torch.tensor([True, False]),
        "mode": AutoresetMode.SAME_STEP,
    },
    "last observations of .* must be a dict .* got list": {
        "terminated": torch.tensor([True, False]),
        "mode": AutoresetMode.SAME_STEP,
        "infos": {"final_obs": [None, None]},
    },
    "last observations of .* must be a dict .* got dict": {
        "terminated": torch.tensor([True, False]),
        "mode": AutoresetMode.SAME_STEP,
        "infos": {"final_obs": {"vector": None}},
    },
    r"infos\['is_success'\].*got list": {
        "terminated": torch.tensor([True, False]),
        "infos": {"is_success": [True, False]},
    },
}


@pytest.mark.parametrize(("message", "results"), FAULTS.items(), ids=range(len(FAULTS)))
def test_faulty_tensor_is_named_at_the_first_step(message, results):
    env = TensorVecEnv(Constant(**results))
    env.reset()
    with pytest.raises(FaultyEnvironmentError, match=message):
        env.step_tensors(torch.zeros(2, dtype=torch.long))


def test_a_mapping_that_is_no_dict_is_named():
    inner = Constant()
    env = TensorVecEnv(inner)
    env.reset()
    inner.observations = lambda make=inner.observations: UserDict(make())
    with pytest.raises(FaultyEnvironmentError, match=r"must be a dict with the entry .*got UserDict"):
        env.step_tensors(torch.zeros(2, dtype=torch.long))


def test_faulty_observation_is_named_at_the_first_reset():
    inner = Constant(vector=torch.zeros(2, 3))
    inner.started = True
    with pytest.raises(FaultyEnvironmentError, match="first observations 'vector' of"):
        TensorVecEnv(inner).reset()


@pytest.mark.parametrize(
    ("results", "valid"),
    [
        ({}, True),
        ({"vector": torch.full((2, 2), 1.0)}, True),
        ({"vector": torch.full((2, 2), 1.1)}, False),
        ({"vector": torch.full((2, 2), float("nan"))}, False),
        ({"choice": torch.tensor([0, 3])}, False),
        ({"choice": torch.tensor([-1, 0])}, False),
        ({"any": torch.full((2, 1), 1e30)}, True),
        ({"any": torch.full((2, 1), float("inf"))}, False),
        ({"any": torch.full((2, 1), float("nan"))}, False),
        ({"rewards": torch.tensor([0, float("nan")])}, False),
        ({"rewards": torch.tensor([0, 1])}, True),
        ({"vector": torch.zeros(2, 2, dtype=torch.float64), "choice": torch.ones(2, dtype=torch.int8)}, True),
    ],
)
def test_values_are_tested_on_the_device(results, valid):
    env = TensorVecEnv(Constant(**results))
    env.reset()
    assert env.step_tensors(torch.zeros(2, dtype=torch.long)).valid == valid


def test_rewards_and_observations_are_copies():
    results = {"rewards": torch.ones(2), "vector": torch.zeros(2, 2)}
    env = TensorVecEnv(Constant(**results))
    env.reset()
    obs, rewards, _, _ = env.step(np.zeros(2, np.int64))
    for tensor in results.values():
        tensor.fill_(7)
    assert rewards.tolist() == [1, 1]
    assert not obs["vector"].any()


def test_gradients_of_a_differentiable_environment_are_not_used():
    numbers = torch.ones(2, requires_grad=True)
    env = TensorVecEnv(
        Constant(rewards=numbers, vector=numbers.expand(2, 2), terminated=torch.ones(2).bool())
    )
    env.reset()
    obs, rewards, _, infos = env.step(np.zeros(2, np.int64))
    assert rewards.tolist() == [1, 1]
    assert obs["vector"].tolist() == [[1, 1], [1, 1]]
    assert infos[0]["terminal_observation"]["vector"].tolist() == [1, 1]
    step = env.step_tensors(torch.zeros(2, dtype=torch.long))
    assert not step.rewards.requires_grad
    assert not step.observations["vector"].requires_grad


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_unsigned_observations_are_tested(dtype):
    checks = TensorChecks("env", spaces.Box(2, 1000, (1,), dtype), 2, torch.device("cpu"))
    for values, valid in (([2, 1000], True), ([2, 1001], False), ([1, 5], False)):
        observations = torch.from_numpy(np.array(values, dtype)[:, None])
        assert bool(checks.valid(observations, torch.zeros(2))) == valid
        assert bool(checks.valid(observations.int(), torch.zeros(2))) == valid


class FaultyResets(Constant):
    """`Constant` without autoreset, whose observations after the end of an episode are NaN."""

    def __init__(self):
        super().__init__(AutoresetMode.DISABLED, terminated=torch.tensor([True, False]))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed=seed, options=options)
        if options:
            observations["any"] = torch.full((2, 1), float("nan"))
        return observations, infos


def test_first_observations_after_an_episode_are_tested():
    env = TensorVecEnv(FaultyResets())
    env.reset()
    assert not env.step_tensors(torch.zeros(2, dtype=torch.long)).valid


class ClearedSuccesses(Constant):
    """`Constant` without autoreset, whose resets clear the success flags of the step."""

    def __init__(self):
        super().__init__(AutoresetMode.DISABLED, terminated=torch.ones(2).bool())
        self.results["infos"] = {"is_success": torch.zeros(2, dtype=torch.bool)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.results["infos"]["is_success"].zero_()
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        self.results["infos"]["is_success"].copy_(torch.tensor([True, False]))
        return super().step(actions)


def test_success_is_that_before_the_reset():
    env = TensorVecEnv(ClearedSuccesses())
    env.reset()
    _, _, _, infos = env.step(np.zeros(2, np.int64))
    assert [info["is_success"] for info in infos] == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_done_flags_on_the_host_equal_those_on_the_device(mode):
    env = TensorVecEnv(Tensors(scripted(mode)))
    env.reset()
    steps = [env.step_tensors(torch.zeros(3, dtype=torch.long)) for _ in range(30)]
    for step in steps:
        np.testing.assert_array_equal(step.dones, step.ends.numpy(), strict=True)
    assert any(step.dones.any() for step in steps)


def test_ignored_bounds_leave_the_test_for_finite_numbers():
    env = TensorVecEnv(Constant(vector=torch.tensor([[2.0, 0.0], [0.0, 0.0]])))
    env.reset()
    env.ignore_bounds()
    assert env.step_tensors(torch.zeros(2, dtype=torch.long)).valid
    env.env.results["vector"] = torch.tensor([[2.0, float("nan")], [0.0, 0.0]])
    assert not env.step_tensors(torch.zeros(2, dtype=torch.long)).valid


def test_sparse_infos_are_a_sequence_of_dicts():
    infos = SparseInfos(3, {1: {"filler": True}})
    assert list(infos) == [{}, {"filler": True}, {}]
    assert infos[-2] == infos[1] == {"filler": True}
    assert infos[1:] == [{"filler": True}, {}]
    infos[0]["mine"] = 1
    assert infos[2] == {}
    with pytest.raises(IndexError):
        infos[3]


def test_state_continues_with_the_same_episodes():
    """The rest of the counts, and the reset steps, are those of the environment that was not saved."""

    def made() -> TensorVecEnv:
        return TensorVecEnv(TMazeTensor(2, 2, autoreset_mode="NextStep", device="cpu"))

    for before in (2, 3):  # the last step of an episode is the third
        one, other = made(), made()
        played(one, before)
        other.reset()
        other.load_state(one.state())
        for _ in range(6):
            results = [env.step(np.zeros(2, dtype=np.int64)) for env in (one, other)]
            results = [(*rest, [without_time(info) for info in infos]) for *rest, infos in results]
            np.testing.assert_equal(*results)


def test_bounds_of_int64_do_not_overflow():
    space = spaces.Box(0, np.iinfo(np.int64).max, (1,), np.int64)
    space.bounded_above[:] = False
    low, high = _limits(space, torch.device("cpu"))
    assert (low.tolist(), high.tolist()) == ([0], [np.iinfo(np.int64).max])
