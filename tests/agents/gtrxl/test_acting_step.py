"""The acting step as a function of tensors chooses the actions of `predict`, also after torch.export."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecNormalize, VecTransposeImage

from rlxf.agents.gtrxl.acting_step import GTrXLActingStep, raw_observation_space
from rlxf.attention import (
    ACT,
    CALM,
    GRU,
    KNN,
    LSH,
    LSTM,
    RMT,
    XL,
    BigBird,
    Compressive,
    CoPE,
    Full,
    InfiniAttention,
    LayerKernels,
    LearnedAbsolute,
    Linformer,
    Mamba2,
    MinGRU,
    RoPE,
    Softmax,
    StreamingXL,
    Window,
    XPos,
)
from rlxf.export.formats import ExportError, trace_step
from rlxf.export.onnx_player import Player
from rlxf.utils.warnings import silenced
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    OBSERVATIONS,
    SMALL_EXTRACTOR,
    recurrent_core,
    sampled,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ENVS = 2
CORES = {
    "XL": small_core(),
    "StreamingXL": replace(small_core(), memory=StreamingXL(3, 2), pattern=Full()),
    "Compressive": replace(small_core(), memory=Compressive(2, 2, 2), pattern=Full()),
    "RoPE": replace(small_core(), position=RoPE(), memory=XL(4), pattern=Window(5)),
    "XPos": replace(small_core(), position=XPos(), memory=XL(4), pattern=Window(5)),
    "LearnedAbsolute": replace(small_core(), position=LearnedAbsolute(60), memory=XL(4), pattern=Window(5)),
    "LSH": replace(small_core(), kernel=LSH(), position=None, memory=XL(4), pattern=Window(5)),
    "CoPE": replace(small_core(), position=CoPE(3)),
    "GatedDeltaNet": recurrent_core(),
    "MinGRU": recurrent_core(recurrence=MinGRU()),
    "LSTM": recurrent_core(recurrence=LSTM()),
    "Mamba-2 below attention": replace(small_core(), recurrence=Mamba2(state=4), attention_layers=(1,)),
    "attention below GRU": replace(small_core(), recurrence=GRU(), attention_layers=(0,)),
    "ACT": replace(small_core(), layers=3, depth=ACT(bias=-1.0)),
}


def named(observations):
    """Return observations as named tensors."""
    if not isinstance(observations, dict):
        return {"observation": torch.as_tensor(observations)}
    return {f"observation.{key}": torch.as_tensor(value) for key, value in observations.items()}


@torch.no_grad()
def largest_difference(agent, function, step, steps=40):
    """Return the largest difference between actions of `predict` and of the functional step."""
    space, rng, worst = agent.observation_space, np.random.default_rng(0), 0.0
    space.seed(0)
    normalizer, state, tensors, seen = agent.get_vec_normalize_env(), None, step.state, []
    for number in range(steps):
        start, raw = (rng.random(ENVS) < 0.1) | (number == 0), sampled(space, ENVS)
        observation = raw if normalizer is None else normalizer.normalize_obs(raw)
        expected, state = agent.predict(observation, state, start, deterministic=True)
        actions, tensors = function(named(raw), torch.as_tensor(start), tensors)
        assert actions.numpy().dtype == expected.dtype
        assert actions.shape == expected.shape
        worst = max(worst, float(np.abs(actions.numpy() - expected).max()))
        seen.append(expected)
    assert len(np.unique(np.concatenate(seen), axis=0)) > 1, "all actions are equal"
    return worst


def small(actions="Box", policy="MlpGTrXLPolicy", **changes):
    env = scripts(shifted(ENVS), OBSERVATIONS[policy], ACTIONS[actions])
    return small_agent(env, policy, **changes)


def traced(agent, step):
    with silenced():
        return trace_step(step, vars(agent.core)).module()


GENERAL = ("Compressive", "StreamingXL", "ACT")
"""Cores with XLRelative and without a fused step, whose graphs have the most kinds of operations."""


@pytest.mark.first_cases(len(GENERAL))
@pytest.mark.parametrize("name", [*GENERAL, *(name for name in CORES if name not in GENERAL)])
def test_onnxruntime_acts_as_predict(name, tmp_path):
    core = CORES[name]
    pytest.importorskip("onnxruntime")
    agent = small(core=core)
    agent.export(tmp_path / "policy.onnx", n_envs=ENVS)
    player, state, own = Player(tmp_path / "policy.onnx"), None, None
    rng, space = np.random.default_rng(0), agent.observation_space
    for number in range(40):
        start, observation = (rng.random(ENVS) < 0.1) | (number == 0), sampled(space, ENVS)
        expected, state = agent.predict(observation, state, start, deterministic=True)
        action, own = player.predict(observation, own, start)
        np.testing.assert_allclose(action, expected, atol=1e-5)


def test_few_learned_positions_can_be_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    core = replace(small_core(), position=LearnedAbsolute(3), memory=XL(2), pattern=Window(3))
    small(core=core).export(tmp_path / "policy.onnx", n_envs=ENVS)
    assert Player(tmp_path / "policy.onnx").envs == ENVS


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_exported_step_equals_predict(core):
    agent = small(core=core)
    step = GTrXLActingStep(agent.policy, None, ENVS).eval()
    assert largest_difference(agent, traced(agent, step), step) < 1e-5


@pytest.mark.parametrize("actions", ACTIONS)
def test_step_equals_predict_for_all_actions(actions):
    agent = small(actions)
    step = GTrXLActingStep(agent.policy, None, ENVS).eval()
    assert largest_difference(agent, step, step) < 1e-5


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("policy", OBSERVATIONS)
def test_exported_step_reads_all_observations(policy):
    agent = small(policy=policy, policy_kwargs=SMALL_EXTRACTOR[policy])
    step = GTrXLActingStep(agent.policy, None, ENVS).eval()
    assert largest_difference(agent, traced(agent, step), step) < 1e-5


LAST = spaces.Box(0, 255, (40, 36, 3), np.uint8)
"""Image with channels in the last axis, which SB3 transposes for the policy."""
IMAGES = {
    "CnnGTrXLPolicy": LAST,
    "MultiInputGTrXLPolicy": spaces.Dict({"image": LAST, "vector": spaces.Box(-1.0, 1.0, (3,), np.float32)}),
}


def check_raw_images(agent, env):
    step = GTrXLActingStep(agent.policy, agent._observation_normalizer(), ENVS, raw_observation_space(env))
    step.eval()
    state, tensors, worst = None, step.state, 0.0
    for number in range(8):
        raw, start = sampled(env.unwrapped.observation_space, ENVS), np.full(ENVS, number == 0)
        given = env.normalize_obs(raw) if isinstance(env, VecNormalize) else raw
        expected, state = agent.predict(given, state, start, deterministic=True)
        actions, tensors = step(named(raw), torch.as_tensor(start), tensors)
        worst = max(worst, float(np.abs(actions.numpy() - expected).max()))
    assert worst < 1e-5
    assert step.spaces[0] == env.unwrapped.observation_space
    assert {name: tuple(x.shape[1:]) for name, x in step.observations.items()} == {
        name: x.shape[1:] for name, x in named(raw).items()
    }


@torch.no_grad()
@pytest.mark.parametrize("policy", IMAGES)
def test_step_transposes_the_images_of_the_environment(policy):
    env = scripts(shifted(ENVS), IMAGES[policy], ACTIONS["Box"])
    check_raw_images(small_agent(env, policy), env)


@torch.no_grad()
@pytest.mark.parametrize("keys", [["vector"], ["vector", "image"]])
def test_step_normalizes_and_transposes(keys):
    policy = "MultiInputGTrXLPolicy"
    env = VecNormalize(scripts(shifted(ENVS), IMAGES[policy], ACTIONS["Box"]), norm_obs_keys=["vector"])
    if "image" in keys:
        env = VecNormalize(VecTransposeImage(env.venv), norm_obs_keys=["vector"])
    env.reset()
    for _ in range(5):
        env.step(np.stack([env.action_space.sample() for _ in range(ENVS)]))
    env.training = False
    check_raw_images(small_agent(env, policy), env)


@pytest.mark.parametrize("policy", ["MlpGTrXLPolicy", "MultiInputGTrXLPolicy"])
def test_step_normalizes_as_the_training_did(policy):
    keys = ["vector"] if policy == "MultiInputGTrXLPolicy" else None
    env = VecNormalize(scripts(shifted(ENVS), OBSERVATIONS[policy], ACTIONS["Box"]), norm_obs_keys=keys)
    env.reset()
    for _ in range(20):
        env.step(np.stack([env.action_space.sample() for _ in range(ENVS)]))
    agent = small_agent(env, policy, policy_kwargs=SMALL_EXTRACTOR[policy])
    env.training = False
    step = GTrXLActingStep(agent.policy, env, ENVS).eval()
    assert largest_difference(agent, step, step) < 1e-5


def test_missing_statistics_are_an_error(tmp_path):
    agent = small()
    agent.normalized_observations = True
    with pytest.raises(ValueError, match=r"normalized by VecNormalize, whose statistics it lacks.*set_env"):
        agent.export(tmp_path / "policy.onnx")


def test_memory_across_episodes_ignores_episode_starts():
    agent = small(persist_memory_across_episodes=True)
    step = GTrXLActingStep(agent.policy, None, ENVS).eval()
    assert largest_difference(agent, step, step) < 1e-5


def test_tracing_does_not_change_the_agent():
    agent = small(core=CORES["CoPE"])
    observation = sampled(agent.observation_space, ENVS)
    before, _ = agent.predict(observation, deterministic=True)
    traced(agent, GTrXLActingStep(agent.policy, None, ENVS))
    np.testing.assert_array_equal(agent.predict(observation, deterministic=True)[0], before)


@pytest.mark.parametrize(
    ("core", "message"),
    [
        (
            replace(small_core(), memory=KNN(3, 20, 4), pattern=Window(4)),
            r"tokens of KNN\(.*another memory",
        ),
        (replace(small_core(), memory=RMT(4, 2), pattern=Full()), r"segment of RMT\(.*another memory"),
        (replace(small_core(), kernel=Linformer(2, 1), position=None), r"kernel Linformer\(.*another kernel"),
        (
            replace(small_core(), pattern=BigBird(1, 1, 1, 1, 0) & Window(5)),
            r"^pattern BigBird\(.*another pattern",
        ),
        (
            replace(small_core(), kernel=LayerKernels(Softmax(), Linformer(2, 1), (1,)), position=None),
            r"^kernel Linformer\(.*another kernel",
        ),
        (recurrent_core(recurrence=InfiniAttention(3)), r"recurrence InfiniAttention\(.*another recurrence"),
    ],
    ids=["KNN", "RMT", "Linformer", "BigBird in a window", "Linformer in one layer", "InfiniAttention"],
)
def test_untraceable_techniques_are_named(tmp_path, core, message):
    with pytest.raises(ValueError, match=message):
        small(core=core).export(tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir())


def test_early_exits_are_refused(tmp_path):
    agent = small(core=recurrent_core(layers=3, depth=CALM("state", 0.5)))
    with pytest.raises(ValueError, match=r"export needs outputs of one depth, but CALM\(.*exits early"):
        agent.export(tmp_path / "policy.pt2")


class Branching(FlattenExtractor):
    """Features extractor that branches on values, which torch.export cannot trace."""

    def forward(self, observations):
        return super().forward(observations if observations.sum() > 0 else -observations)


def test_untraceable_features_extractor_is_named(tmp_path):
    agent = small(policy_kwargs={"features_extractor_class": Branching})
    with pytest.raises(ExportError, match=r"features extractor Branching .*torch\.where in place of if"):
        agent.export(tmp_path / "policy.pt2")


class Recording(FlattenExtractor):
    """Features extractor that keeps what cannot be copied."""

    def __init__(self, space, kept):
        super().__init__(space)
        self.kept = kept()


@pytest.mark.parametrize("kept", [threading.Lock, lambda: [torch.ones(1, requires_grad=True) * 2]])
def test_features_extractor_that_cannot_be_copied_is_named(kept, tmp_path):
    options = {"features_extractor_class": Recording, "features_extractor_kwargs": {"kept": kept}}
    agent = small(policy_kwargs=options)
    with pytest.raises(ValueError, match=r"attribute of its features_extractor Recording cannot be copied"):
        agent.export(tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir())


class FirstStep(torch.nn.Module):
    """Wrapper of Stable-Baselines3's guide for ONNX."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation):
        return self.policy(observation, deterministic=True)[:3]


def test_policy_can_be_traced_as_in_the_guide_of_sb3():
    agent = small("Discrete")
    agent.policy.set_training_mode(False)
    observation = torch.as_tensor(sampled(agent.observation_space, ENVS))
    module = FirstStep(agent.policy)
    with silenced():
        jitted = torch.jit.trace(module, observation)
    for first, second in zip(jitted(observation), module(observation), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_forward_is_exported_as_in_the_guide_of_sb3(env, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    actor, file = FirstStep(small_agent(env).policy).eval(), tmp_path / "policy.onnx"
    observation = torch.ones(1, *actor.policy.observation_space.shape)
    with silenced():
        torch.onnx.export(actor, observation, file, opset_version=18, dynamo=True, input_names=["input"])
    results = runtime.InferenceSession(file).run(None, {"input": 2 * observation.numpy()})
    for result, expected in zip(results, actor(2 * observation), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
