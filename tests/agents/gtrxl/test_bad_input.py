"""Bad input raises a clear error before training."""

import dataclasses
import math
import re
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, RescaleAction, ReshapeObservation, TimeLimit
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlxf import GTrXLPPO, collect, evaluate
from rlxf.agents.gtrxl import gtrxl
from rlxf.agents.gtrxl.policies import default_policy_name
from rlxf.attention import (
    GLA,
    XL,
    Full,
    LearnedAbsolute,
    LearnedPerLayer,
    Longformer,
    Multiplicative,
    Performer,
    RoPE,
    TransformerSpec,
    Tupe,
    Window,
)
from rlxf.envs import make_vec_env
from rlxf.training import linear
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    DICT,
    IMAGE,
    RECURRENT_CORES,
    VECTOR,
    Scripted,
    parameters,
    same,
    small_agent,
    small_core,
)

TMAZE = "rlxf/TMaze-v0"
TINY_IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)
ANY_SPACE = "tests.envs.small_envs:rlxf-test/AnySpace-v0"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_steps": 6}, "n_steps must be a multiple of segment_length=4, got 6"),
        ({"n_steps": 0}, "n_steps must be an integer of at least 1, got 0"),
        ({"segment_length": 0}, "segment_length must be an integer of at least 1, got 0"),
        ({"segment_length": 32}, "n_steps must be a multiple of segment_length=32, got 16"),
        ({"batch_size": 10}, "batch_size must be a multiple of segment_length=4, got 10"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"n_epochs": 0}, "n_epochs must be an integer of at least 1, got 0"),
        ({"n_envs": 0}, "n_envs must be an integer of at least 1, got 0"),
        ({"n_envs": -3}, "n_envs must be an integer of at least 1, got -3"),
        ({"core": None, "memory_length": 0}, "memory_length must be at least 1, got 0"),
        ({"memory_length": 16}, "memory_length=16 and the core's XL.length=8. disagree"),
        ({"gamma": 1.01}, "gamma must be a finite number from 0 to 1, got 1.01"),
        ({"gamma": math.nan}, "gamma must be a finite number from 0 to 1, got nan"),
        ({"gae_lambda": -0.1}, "gae_lambda must be a finite number from 0 to 1, got -0.1"),
        ({"critic_lambda": 1.5}, "critic_lambda must be a finite number from 0 to 1 or None, got 1.5"),
        ({"vf_coef": -1.0}, "vf_coef must be a finite number of at least 0, got -1.0"),
        (
            {"reconstruction_coef": -0.5},
            "reconstruction_coef must be a finite number of at least 0, got -0.5",
        ),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number of more than 0, got 0.0"),
        ({"advantage_epsilon": 0.0}, "advantage_epsilon must be a finite number of more than 0, got 0.0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm must be a finite number of more than 0, got inf"),
        ({"target_kl": 0.0}, "target_kl must be a finite number of more than 0 or None, got 0.0"),
    ],
    ids=str,
)
def test_a_setting_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        small_agent(TMAZE, **wrong)


def test_settings_at_bounds_of_range():
    small_agent(TMAZE, gamma=1.0, gae_lambda=0.0, target_kl=0.01, reconstruction_coef=0.0, memory_length=8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "heads must divide width, got 3 heads and width 16"),
        ({"memory_length": 0}, "memory length must be at least 1, got 0"),
        ({"memory_length": -1}, "at least"),
    ],
    ids=str,
)
def test_a_core_of_wrong_size(wrong, message):
    with pytest.raises(ValueError, match=message):
        gtrxl(**({"memory_length": 8, "width": 16, "heads": 2} | wrong))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": None}, "needs a core with memory, e.g. memory=XL"),
        (
            {"memory": None, "recurrence": GLA(), "attention_layers": (0,)},
            r"needs a core with memory, e.g. memory=XL.* or attention_layers=\(\) for GLA\(.*\) alone",
        ),
        (
            {"memory": None, "causal": False},
            r"needs causal=True .* e.g. TransformerSpec\(memory=XL.* got causal=False, cross_attention=False",
        ),
        ({"cross_attention": True}, r"cross_attention=False, e.g. .* got causal=True, cross_attention=True"),
        ({"dropout": 0.1}, "dropout must be 0, got 0.1"),
        ({"kernel": Performer(redraw=9), "position": RoPE()}, "must have redraw=None"),
        ({"pattern": Full()}, r"reaches farther back than XL\(length=8\).* use pattern=Window\(size=9\)"),
        (
            {"pattern": Window(10)},
            r"reaches farther back than XL\(length=8\).* use pattern=Window\(size=9\)",
        ),
        (
            {"pattern": Longformer()},
            r"reaches farther back than XL\(length=8\).* use pattern=Longformer\(.*farthest=8\)",
        ),
    ],
    ids=str,
)
def test_core_whose_acting_differs_from_training_is_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        small_agent(TMAZE, core=dataclasses.replace(small_core(), **changes))


def test_window_may_be_shorter_than_memory():
    core = TransformerSpec(width=16, heads=2, memory=XL(8), pattern=Window(4))
    assert small_agent(TMAZE, core=core).core == core


def test_default_core_has_memory_length():
    agent = GTrXLPPO("MlpGTrXLPolicy", TMAZE, memory_length=5, n_envs=1)
    assert agent.core == gtrxl(5)
    assert agent.rollout_buffer.memory_length == 5


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_of_environments_that_differs_from_that_of_an_object(number, tmp_path):
    env = gymnasium.make(TMAZE) if number == 1 else make_vec_env(TMAZE, number)
    with pytest.warns(UserWarning, match=rf"n_envs=8 has no effect, .* object with {number} environment"):
        small_agent(env, n_envs=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(env, n_envs=number).save(tmp_path / "agent")
        small_agent(env)
        GTrXLPPO.load(tmp_path / "agent", env=make_vec_env(TMAZE, 3))


def test_settings_at_the_position_of_the_policy(tmp_path):
    small_agent(TMAZE).save(tmp_path / "agent")
    with pytest.raises(TypeError, match=r"policy must be .* by name, custom_objects=\{'n_steps': 32\}"):
        GTrXLPPO.load(tmp_path / "agent", None, "cpu", {"n_steps": 32})


def test_an_unknown_environment_id():
    with pytest.raises(
        ValueError, match=r"unknown environment id 'rlxf/TMase-v0'; similar ids: .*rlxf/TMaze-v0"
    ):
        small_agent("rlxf/TMase-v0")


def test_no_environment():
    with pytest.raises(ValueError, match="env is None: pass a Gymnasium id"):
        small_agent(None)


def test_no_environment_in_set_env():
    agent = small_agent(TMAZE)
    with pytest.raises(TypeError, match="set_env needs an environment, got None"):
        agent.set_env(None)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("make", [lambda each: each(), lambda each: make_vec_env(each, 1)], ids=["Env", "id"])
def test_environment_without_a_space(make, name):
    class Spaceless(gymnasium.Env):
        observation_space, action_space = VECTOR, spaces.Discrete(2)

    delattr(Spaceless, name)
    with pytest.raises(TypeError, match=f"Spaceless instance> has no {name}: set it to a space"):
        small_agent(make(Spaceless))


@pytest.mark.parametrize("value", ["x", [("net_arch", [])]])
def test_policy_kwargs_of_wrong_type(value):
    with pytest.raises(TypeError, match="policy_kwargs must be a dict of arguments of the policy"):
        small_agent(TMAZE, policy_kwargs=value)


@pytest.mark.parametrize("env", [5, ["CartPole-v1"], gymnasium.Env], ids=str)
def test_env_of_wrong_type(env):
    with pytest.raises(TypeError, match="env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got"):
        small_agent(env)


def test_a_class_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"got <class .*>; pass make_vec_env\(FUNCTION_OR_CLASS, n_envs\)"):
        small_agent(gymnasium.Env)


def test_core_of_wrong_type():
    with pytest.raises(TypeError, match="core must be a TransformerSpec, got"):
        small_agent(TMAZE, core={"width": 16})


def test_an_unknown_policy():
    with pytest.raises(
        ValueError,
        match=r"unknown policy 'MlpPolice'; use one of MlpGTrXLPolicy, .*; did you mean MlpPolicy\?",
    ):
        GTrXLPPO("MlpPolice", TMAZE)


@pytest.mark.parametrize("place", ["settings", "policy_kwargs"])
def test_a_typo(place):
    wrong = {"learning_rat": 1e-3}
    with pytest.raises(TypeError, match="takes no argument 'learning_rat'; "):
        small_agent(TMAZE, **(wrong if place == "settings" else {"policy_kwargs": wrong}))


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (spaces.Text(5), spaces.Discrete(2), "observation space .* Text.* not supported. Allowed are"),
        (spaces.Tuple([VECTOR]), spaces.Discrete(2), "observation space .* Tuple"),
        (
            spaces.Dict({"in": spaces.Dict({"a": VECTOR})}),
            spaces.Discrete(2),
            "'in' Dict.*FlattenObservation",
        ),
        (VECTOR, spaces.Tuple([spaces.Discrete(2)]), "action space .* Tuple"),
        (VECTOR, spaces.Box(-np.inf, np.inf, (1,)), "action space .* no finite bounds"),
    ],
    ids=str,
)
def test_an_unsupported_space(observation_space, action_space, message):
    env = DummyVecEnv([lambda: Scripted(observation_space=VECTOR)])
    env.observation_space, env.action_space = observation_space, action_space
    with pytest.raises(TypeError, match=message):
        small_agent(env)


@pytest.mark.parametrize(
    ("policy", "observation_space", "right"),
    [
        ("MlpGTrXLPolicy", DICT, "MultiInputGTrXLPolicy"),
        ("CnnGTrXLPolicy", DICT, "MultiInputGTrXLPolicy"),
        ("CnnGTrXLPolicy", VECTOR, "MlpGTrXLPolicy"),
        ("MultiInputGTrXLPolicy", VECTOR, "MlpGTrXLPolicy"),
        ("MultiInputGTrXLPolicy", IMAGE, "CnnGTrXLPolicy"),
    ],
    ids=str,
)
def test_policy_for_another_observation_space(policy, observation_space, right):
    message = rf"{policy} does not support the observation space .*; use '{right}'"
    with pytest.raises(ValueError, match=message):
        small_agent(Scripted(observation_space=observation_space), policy)


def test_grayscale_images_need_an_axis_of_channels():
    space = spaces.Box(0, 255, (40, 36), np.uint8)
    advice = r"GrayscaleObservation\(env, keep_dim=True\) or ReshapeObservation\(env, \(40, 36, 1\)\)"
    with pytest.raises(ValueError, match=advice):
        small_agent(Scripted(observation_space=space), "CnnGTrXLPolicy")
    env = ReshapeObservation(Scripted(observation_space=space), (40, 36, 1))
    small_agent(env, "CnnGTrXLPolicy", n_envs=1)
    with pytest.warns(UserWarning, match=rf"flattens images of shape \(40, 36\).*{advice}"):
        small_agent(Scripted(observation_space=space), "MlpGTrXLPolicy", n_envs=1)


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 255, (40, 20), np.uint8), spaces.Box(0, 255, (40, 40), np.float32)], ids=str
)
def test_other_matrices_are_flattened_without_a_warning(space):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(Scripted(observation_space=space), "MlpGTrXLPolicy", n_envs=1)


def test_stacked_images_of_gymnasium():
    env = FrameStackObservation(Scripted(observation_space=spaces.Box(0, 255, (40, 40, 3), np.uint8)), 4)
    with pytest.raises(ValueError, match=r"leave FrameStackObservation out.*VecFrameStack"):
        small_agent(env, "CnnGTrXLPolicy", n_envs=1)


@pytest.mark.parametrize("policy", [None, 3, dict])
def test_policy_that_is_no_policy(policy):
    with pytest.raises(TypeError, match=r"policy must be one of MlpGTrXLPolicy, .* got "):
        GTrXLPPO(policy, Scripted(), device="cpu")


def test_memory_length_of_a_core_without_memory():
    message = r"memory_length=8 does not apply: .* only the state of LSTM\(.*; leave memory_length out"
    with pytest.raises(ValueError, match=message):
        small_agent(Scripted(), memory_length=8, core=RECURRENT_CORES["LSTM"], n_envs=1)


def test_keys_of_observations_that_are_not_text():
    space = spaces.Dict({1: VECTOR})
    with pytest.raises(TypeError, match=r"observation space .* has the key 1 \(int\): keys must be text"):
        small_agent(Scripted(observation_space=space), "MultiInputGTrXLPolicy", n_envs=1)


@pytest.mark.parametrize("bounds", [(100, 200), (-200, -100), (-0.01, 0.01), (0, 1000)], ids=str)
def test_action_bounds_that_first_actions_hardly_explore(bounds):
    space = spaces.Box(*bounds, (2,), np.float32)
    with pytest.warns(UserWarning, match=r"standard deviation 1, .*RescaleAction\(env, -1, 1\)"):
        agent = small_agent(Scripted(action_space=space), n_envs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(RescaleAction(Scripted(action_space=space), -1, 1), n_envs=1)
    assert agent.action_space == space


@pytest.mark.parametrize("options", [{}, {"use_sde": True}], ids=["independent", "state-dependent"])
@pytest.mark.parametrize("bounds", [(-2, 2), (-0.4, 0.4), (0, 1), (0.1, 1), (-3, 3)], ids=str)
def test_common_action_bounds_give_no_warning(bounds, options):
    space = spaces.Box(*bounds, (2,), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(Scripted(action_space=space), n_envs=1, **options)


def test_the_first_standard_deviation_may_fit_other_action_bounds():
    space, kwargs = spaces.Box(-0.01, 0.01, (2,), np.float32), {"log_std_init": -5.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_agent(Scripted(action_space=space), n_envs=1, policy_kwargs=kwargs)


def test_images_of_real_numbers_need_an_argument():
    space = spaces.Box(0, 1, (3, 36, 36), np.float32)
    with pytest.raises(ValueError, match=r"must be uint8 .*pass policy_kwargs=\{'normalize_images': False\}"):
        small_agent(Scripted(observation_space=space), "CnnGTrXLPolicy")
    kwargs = {"normalize_images": False, "features_extractor_kwargs": {"features_dim": 16}}
    agent = small_agent(Scripted(observation_space=space), "CnnGTrXLPolicy", n_envs=1, policy_kwargs=kwargs)
    assert isinstance(agent.policy.features_extractor, NatureCNN)


@pytest.mark.parametrize(
    ("parts", "remedy"), [((), "norm_obs=False"), (("number",), r"norm_obs_keys=\['number'\]")]
)
def test_normalized_images_in_a_dict_are_refused(parts, remedy):
    space = spaces.Dict({"eye": IMAGE, "number": VECTOR})
    env = VecNormalize(with_spaces(space), norm_obs_keys=["eye", *parts])
    with pytest.raises(
        ValueError, match=rf"the image 'eye' of a Dict observation.*VecNormalize\(env, {remedy}\)"
    ):
        small_agent(env, "MultiInputGTrXLPolicy")


def test_error_for_id_names_wrapper_that_makes_space_supported():
    with pytest.raises(TypeError, match=r"is a Dict, .* with gymnasium\.wrappers\.FlattenObservation"):
        small_agent(ANY_SPACE)
    env = make_vec_env(ANY_SPACE, 2, wrapper_class=gymnasium.wrappers.FlattenObservation)
    assert small_agent(env).learn(32).num_timesteps == 32


@pytest.mark.parametrize("space", [TINY_IMAGE, spaces.Dict({"image": TINY_IMAGE})], ids=["image", "Dict"])
def test_image_too_small_for_convolutions(space):
    policy = default_policy_name(space)
    with pytest.raises(ValueError, match=r"cannot read .*Box.*needs at least 36 x 36 pixels"):
        GTrXLPPO(policy, Scripted(observation_space=space))


def test_images_of_floats_need_channels_in_the_first_axis():
    raw = {"normalize_images": False}
    with pytest.raises(ValueError, match=r"channels in the first axis, \(3, 40, 48\), or pass another"):
        GTrXLPPO(
            "CnnPolicy", Scripted(observation_space=spaces.Box(0.0, 1.0, (40, 48, 3))), policy_kwargs=raw
        )
    first = Scripted(observation_space=spaces.Box(0.0, 1.0, (3, 40, 48)))
    assert GTrXLPPO("CnnPolicy", first, policy_kwargs=raw).observation_space.shape == (3, 40, 48)


class Poisoned(gymnasium.Wrapper):
    """Insert a value into the reward, observation or last observation of one step (0: the reset)."""

    def __init__(self, env, step, where, value):
        super().__init__(env)
        self.life, self.step_number, self.where, self.value = 0, step, where, value

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return (self._corrupt(obs) if self.where == "observation" else obs), info

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self.where == "reward" and self.life == self.step_number:
            reward = self.value
        return (obs if self.where == "reward" else self._corrupt(obs)), reward, terminated, truncated, info

    def _corrupt(self, obs):
        if self.life != self.step_number:
            return obs
        part = obs["vector"] if isinstance(obs, dict) else obs
        part[1] = self.value
        return obs


def with_spaces(observation_space, action_space=ACTIONS["Discrete"]):
    return DummyVecEnv([lambda: Scripted((0, 0, 1), observation_space, action_space)])


@pytest.mark.parametrize(
    ("observation_space", "action_space", "difference"),
    [
        (
            spaces.Box(-1, 1, (4,)),
            ACTIONS["Discrete"],
            r"observation space: expected .*\(3,\), .*, got .*\(4,\)",
        ),
        (DICT, ACTIONS["Discrete"], "observation space: expected Box.*, got Dict"),
        (VECTOR, spaces.Discrete(5), r"action space: expected Discrete\(3\), got Discrete\(5\)"),
        (VECTOR, spaces.Discrete(3, start=7), r"expected Discrete\(3\), got Discrete\(3, start=7\)"),
    ],
)
def test_environments_with_other_spaces_are_refused(minari_root, observation_space, action_space, difference):
    agent, env = small_agent(with_spaces(VECTOR)), with_spaces(observation_space, action_space)
    with pytest.raises(ValueError, match=difference):
        evaluate(agent, env, episodes=2)
    with pytest.raises(ValueError, match=difference):
        collect(agent, env, "test/other-v0", episodes=2)


@pytest.mark.parametrize("loaded", [False, True])
def test_environments_may_have_other_bounds_and_axes_of_images(tmp_path, loaded):
    last, first = (spaces.Box(0, 255, shape, np.uint8) for shape in [(36, 36, 1), (1, 36, 36)])
    boxes = VECTOR, spaces.Box(-5, 5, (3,), np.float64)
    here, there = (
        spaces.Dict({"image": image, "box": box}) for image, box in zip((last, first), boxes, strict=True)
    )
    agent = small_agent(with_spaces(here), "MultiInputGTrXLPolicy")
    if loaded:
        agent.save(tmp_path / "agent.zip")
        agent = GTrXLPPO.load(tmp_path / "agent.zip")
    for space in (here, there):
        assert evaluate(agent, with_spaces(space), episodes=2).lengths.tolist() == [3, 3]


def test_images_may_be_normalized_by_the_evaluation():
    image = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    agent = small_agent(VecNormalize(with_spaces(image)), policy_kwargs={})
    assert evaluate(agent, with_spaces(image), episodes=2).lengths.tolist() == [3, 3]


SMALL_DICT = spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR})
NEVER, CUT_AT_21 = (0,), (0,) * 20 + (2,) + (0,) * 20


def poisoned(step, where, value, observation_space=VECTOR, ends=NEVER):
    def make(number):
        env = Scripted(ends, observation_space)
        return Poisoned(env, step, where, value) if number == 1 else env

    return DummyVecEnv([lambda n=n: make(n) for n in range(3)])


def poisoned_agent(step, where, value, observation_space=VECTOR, ends=NEVER):
    return small_agent(
        poisoned(step, where, value, observation_space, ends), default_policy_name(observation_space)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["reward", "observation"])
@pytest.mark.parametrize("observation_space", [VECTOR, SMALL_DICT], ids=["vector", "Dict"])
def test_nonfinite_reward_or_observation(where, value, observation_space):
    agent = poisoned_agent(16 + 5, where, value, observation_space)
    agent.learn(3 * 16)
    trained = parameters(agent)
    with pytest.raises(
        ValueError, match=rf"{where}.* of environment 1 is not finite at its step 21.*{value}"
    ):
        agent.learn(3 * 32, reset_num_timesteps=False)
    assert same(parameters(agent), trained)


@pytest.mark.parametrize("where", ["reward", "observation"])
@pytest.mark.parametrize("observation_space", [VECTOR, SMALL_DICT], ids=["vector", "Dict"])
def test_nonfinite_values_do_not_change_statistics(where, observation_space):
    keys = ["vector"] if observation_space is SMALL_DICT else None
    env = VecNormalize(poisoned(21, where, np.nan, observation_space), norm_obs_keys=keys)
    agent = small_agent(env, default_policy_name(observation_space)).learn(3 * 16)
    trained = statistics(env)
    with pytest.raises(ValueError, match=rf"{where}.* of environment 1 is not finite at its step 21: nan"):
        agent.learn(3 * 32, reset_num_timesteps=False)
    assert statistics(env) == trained


def statistics(env):
    observed = env.obs_rms["vector"] if isinstance(env.obs_rms, dict) else env.obs_rms
    parts = [observed.mean, observed.var, observed.count, env.ret_rms.mean, env.ret_rms.var, env.returns]
    return [np.array(part).tolist() for part in parts]


@pytest.mark.parametrize("observation_space", [VECTOR, SMALL_DICT], ids=["vector", "Dict"])
def test_nonfinite_first_observation(observation_space):
    agent = poisoned_agent(0, "observation", np.nan, observation_space)
    initial = parameters(agent)
    with pytest.raises(ValueError, match=r"first observation.* of environment 1 is not finite at its step 0"):
        agent.learn(3 * 16)
    assert same(parameters(agent), initial)


def test_nonfinite_last_observation():
    agent = poisoned_agent(21, "last observation", np.nan, ends=CUT_AT_21)
    with pytest.raises(ValueError, match=r"last observation of environment 1 is not finite at its step 21"):
        agent.learn(3 * 32)


def test_torch_flushes_denormals():
    small_agent(TMAZE)
    assert torch.tensor([1e-40]) * 1 == 0


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "ent_coef"])
@pytest.mark.parametrize("value", [-0.2, float("nan"), float("inf"), linear(-1.0, 0.0)])
def test_a_schedule_that_starts_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got"):
        small_agent(TMAZE, **{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "ent_coef"])
@pytest.mark.parametrize(
    "value", ["linear:0.001:0", None, lambda progress: "0.1"], ids=["str", "None", "call"]
)
def test_schedule_of_wrong_type(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a number or a function of the progress remaining"):
        small_agent(TMAZE, **{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "ent_coef"])
def test_a_schedule_that_ends_out_of_range(name):
    agent = small_agent(TMAZE, **{name: linear(1.0, -0.5)})
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got -0.5 at progress 0"):
        agent.learn(48)
    assert agent.num_timesteps == 0


LIMIT = 200
"""Length of an episode of MountainCar-v0 with random actions."""


def mountain_car_agent(position, env="MountainCar-v0") -> GTrXLPPO:
    core = TransformerSpec(
        width=8, heads=2, layers=1, position=position, pattern=Window(5), memory=XL(4), feed_forward=8
    )
    sizes = {"n_envs": 1, "n_steps": 224, "segment_length": 8, "batch_size": 224, "n_epochs": 1}
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **sizes)


@pytest.mark.parametrize("position", [LearnedAbsolute, LearnedPerLayer, Multiplicative, Tupe])
def test_too_long_episodes_are_rejected_in_constructor(position):
    message = f"max_episode_steps={LIMIT} steps.* {LIMIT + 1} observations.* only {LIMIT} positions"
    with pytest.raises(ValueError, match=message):
        mountain_car_agent(position(max_length=LIMIT))


def test_accepted_position_covers_whole_episode():
    """The last observation of a truncated episode also needs a position."""
    model = mountain_car_agent(LearnedAbsolute(LIMIT + 1)).learn(224)
    assert model.num_timesteps == 224


def test_new_environment_is_checked_by_learn():
    env = make_vec_env("MountainCar-v0", 1)
    model = mountain_car_agent(LearnedAbsolute(LIMIT + 1), env)
    model.set_env(DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)]))
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        model.learn(224)


def test_relative_positions_are_unlimited():
    assert mountain_car_agent(RoPE()).core.position.max_positions is None


def test_evaluation_rejects_longer_episodes_before_first_step():
    env = make_vec_env("MountainCar-v0", 1)
    model = mountain_car_agent(LearnedAbsolute(LIMIT + 1), env)
    longer = DummyVecEnv([lambda: TimeLimit(env.envs[0].unwrapped, 500)])
    longer.step_async = None  # a step would raise TypeError
    with pytest.raises(ValueError, match=re.escape("max_episode_steps=500")):
        evaluate(model, longer, episodes=1)
