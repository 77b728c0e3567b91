"""Compiled acting steps equal eager ones; where there are none, the agent says so and acts alike."""

import pickle
import shutil
import warnings
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import spectral_norm

from rlxf import evaluate
from rlxf.agents.common import compiled_function
from rlxf.agents.common.compiled_function import CompiledFunction
from rlxf.agents.gtrxl import GTrXLPPO, network_step
from rlxf.agents.gtrxl.acting_step import GTrXLActingStep
from rlxf.agents.gtrxl.network_step import CompiledStep, eager_step
from rlxf.attention import (
    ACT,
    GRU,
    KNN,
    LRU,
    XL,
    AdaptiveSpan,
    LearnedAbsolute,
    RoPE,
    SinkSoftmax,
    Window,
    XPos,
)
from rlxf.attention.functional_step import named_tensors
from rlxf.evaluation.callback import EvaluationCallback
from rlxf.utils.errors import CompilationError
from tests.agents.gtrxl.worlds import (
    MIXED,
    OBSERVATIONS,
    VECTOR,
    recurrent_core,
    sampled,
    scripts,
    shifted,
    small_agent,
    small_core,
    with_eager_updates,
)

ENVS = 2
CORES = {
    "XL": small_core(),
    "general step": replace(small_core(), position=RoPE(), memory=XL(4), pattern=Window(5)),
    "scales of positions": replace(small_core(), position=XPos(), memory=XL(4), pattern=Window(5)),
    "spans": replace(small_core(), kernel=AdaptiveSpan(limit=4, ramp=3)),
    "numbers of heads": replace(small_core(), kernel=SinkSoftmax()),
    "recurrence": recurrent_core(),
    "recurrence below attention": replace(small_core(), recurrence=LRU(), attention_layers=(1,)),
    "attention below recurrence": replace(small_core(), recurrence=GRU(), attention_layers=(0,)),
    "adaptive depth": replace(small_core(), layers=3, depth=ACT(bias=-1.0)),
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs the C++ compiler g++")


def agent_of(policy="MlpGTrXLPolicy", **changes):
    """Return a small agent in `ENVS` environments."""
    env = scripts([MIXED] * ENVS, OBSERVATIONS[policy])
    return small_agent(env, policy, n_envs=ENVS, **changes)


def steps(agent, number):
    """Yield random observations, previous actions and indices of the steps of some episodes."""
    policy, generator = agent.policy, torch.Generator().manual_seed(0)
    state, start = policy.initial_state(ENVS), torch.ones(ENVS, dtype=torch.bool)
    agent.observation_space.seed(0)
    for _ in range(number):
        obs, _ = policy.obs_to_tensor(sampled(agent.observation_space, ENVS))
        action = torch.randn(state.action.shape, generator=generator)
        yield obs, action.to(policy.device), state.advance(start.to(policy.device))
        start = torch.rand(ENVS, generator=generator) < 0.2


@torch.no_grad()
def largest_difference(agent, step, number=30):
    """Return the largest difference of outputs and caches between eager steps and ``step``.

    It is relative to the largest number of a tensor, if that is above 1.
    """
    policy, worst = agent.policy, 0.0
    policy.set_training_mode(False)
    caches = [policy.initial_state(ENVS).cache for _ in range(2)]
    for obs, action, index in steps(agent, number):
        runs = zip((eager_step, step), caches, strict=True)
        one, other = (
            [*run(policy, obs, action, index, cache), *named_tensors(cache).values()] for run, cache in runs
        )
        for x, y in zip(one, other, strict=True):
            difference = (x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1)
            worst = max(worst, difference.item())
    assert caches[0].slot == caches[1].slot
    return worst


def actions(agent, number=30):
    """Return the sampled actions of an agent over some episodes."""
    state, start, chosen = None, np.ones(ENVS, bool), []
    rng = np.random.default_rng(0)
    agent.observation_space.seed(0)
    agent.set_random_seed(0)
    for _ in range(number):
        action, state = agent.predict(sampled(agent.observation_space, ENVS), state, start)
        start = rng.random(ENVS) < 0.2
        chosen.append(action)
    return np.stack(chosen)


@pytest.fixture
def traced(monkeypatch):
    """Run traced programs without compiling them; return a list of the programs."""
    programs = []

    def trace(function, examples):
        programs.append(compiled_function.trace(function, examples).module())
        return programs[-1]

    monkeypatch.setattr(network_step, "CompiledFunction", trace)
    return programs


@pytest.fixture(scope="module")
def compiled_agent():
    """Return an agent whose step is compiled once; it has parameters with few elements."""
    return agent_of(core=CORES["numbers of heads"], compile=True)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_traced_steps_equal_eager_ones(core, traced):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert largest_difference(agent_of(core=core), CompiledStep("cpu")) < 1e-5


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("policy", OBSERVATIONS)
def test_each_policy_can_be_traced(policy, traced):
    assert largest_difference(agent_of(policy), CompiledStep("cpu")) < 1e-5


def test_compiled_steps_get_contiguous_observations_of_one_dtype(monkeypatch):
    """A compiled program reads memory as that of its example, whatever strides and dtype its argument has."""
    programs, given = [], []

    def compiled(function, examples):
        programs.append(compiled_function.trace(function, examples).module())
        return lambda *arguments: given.append(arguments[4]) or programs[-1](*arguments)

    monkeypatch.setattr(network_step, "CompiledFunction", compiled)
    agent, step = agent_of(), CompiledStep("cpu")
    agent.policy.set_training_mode(False)
    for obs, action, index in steps(agent, 1):
        wide = torch.stack([obs, torch.zeros_like(obs)], dim=-1)[..., 0]
        assert not wide.is_contiguous()
        caches = [agent.policy.initial_state(ENVS).cache for _ in range(4)]
        expected = eager_step(agent.policy, obs, action, index, caches[0]).latent
        for x, cache in zip((obs, wide, obs.double()), caches[1:], strict=True):
            torch.testing.assert_close(step(agent.policy, x, action, index, cache).latent, expected)
    assert len(programs) == 1
    assert [(x.is_contiguous(), x.dtype) for x in given] == [(True, torch.float32)] * 3


def test_compiled_steps_do_not_depend_on_the_order_of_keys(traced):
    """Environments may return the keys of a dict in any order."""
    space = spaces.Dict({"b": VECTOR, "a": VECTOR})
    agent = small_agent(scripts([MIXED] * ENVS, space), "MultiInputGTrXLPolicy", n_envs=ENVS)
    step = CompiledStep("cpu")
    agent.policy.set_training_mode(False)
    for obs, action, index in steps(agent, 1):
        caches = [agent.policy.initial_state(ENVS).cache for _ in range(3)]
        expected = eager_step(agent.policy, obs, action, index, caches[0]).latent
        for names, cache in zip(("ab", "ba"), caches[1:], strict=True):
            given = {name: obs[name] for name in names}
            torch.testing.assert_close(step(agent.policy, given, action, index, cache).latent, expected)
    assert len(traced) == 1


def test_each_dtype_of_images_is_compiled(traced):
    agent, step = agent_of("CnnGTrXLPolicy"), CompiledStep("cpu")
    agent.policy.set_training_mode(False)
    for obs, action, index in steps(agent, 1):
        results = [
            step(agent.policy, x, action, index, agent.policy.initial_state(ENVS).cache).latent
            for x in (obs, obs.long(), obs)
        ]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    assert len(traced) == 2


def replace_token(policy):
    policy.token = nn.Linear(policy.token.in_features, policy.token.out_features)


def replace_output(policy):
    attention = policy.transformer.blocks[1].attention
    attention.out = nn.Sequential(attention.out, nn.Tanh())


def extend_output(policy):
    policy.transformer.blocks[1].attention.out.append(nn.Tanh())


def parametrize_output(policy):
    """Add a submodule to a module without submodules, whose parameter is then computed."""
    spectral_norm(policy.transformer.blocks[0].attention.out)


def test_a_step_with_replaced_modules_is_compiled_again(traced):
    agent, step = agent_of(), CompiledStep("cpu")
    for number, replace_module in enumerate(
        (replace_token, replace_output, extend_output, parametrize_output)
    ):
        assert largest_difference(agent, step) < 1e-5
        assert len(traced) == number + 1
        replace_module(agent.policy)
    assert largest_difference(agent, step) < 1e-5


def assign_forward(module):
    former = module.forward
    module.forward = lambda x: 2 * former(x)


PATCHES = {
    "hook": lambda module: module.register_forward_hook(lambda module, inputs, y: 2 * y),
    "hook before": lambda module: module.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "forward": assign_forward,
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_step_of_patched_modules_is_not_compiled(patch, compiled_before, traced):
    agent, step = agent_of(), CompiledStep("cpu")
    if compiled_before:
        assert largest_difference(agent, step) < 1e-5
    patch(agent.policy.transformer.norm)
    reason = "because the module transformer.norm has a hook or an assigned forward"
    with pytest.warns(UserWarning, match=f"the acting step is not compiled, {reason}"):
        assert largest_difference(agent, step, 2) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert largest_difference(agent, step) == 0
    assert len(traced) == compiled_before


def test_heads_and_hooks_of_the_backward_pass_do_not_affect_the_step(traced):
    agent, step = agent_of(), CompiledStep("cpu")
    assert largest_difference(agent, step) < 1e-5
    policy = agent.policy
    policy.value_net.register_forward_hook(lambda *_: None)
    policy.transformer.norm.register_full_backward_hook(lambda *_: None)
    policy.action_net = deepcopy(policy.action_net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert largest_difference(agent, step) < 1e-5
    assert len(traced) == 1


def test_a_step_is_compiled_after_its_hooks_were_removed(traced):
    agent, step = agent_of(), CompiledStep("cpu")
    with register_module_forward_hook(lambda *_: None), pytest.warns(UserWarning, match="for all modules"):
        largest_difference(agent, step, 2)
    assert not traced
    assert largest_difference(agent, step) < 1e-5
    assert traced


def test_a_policy_with_a_compiled_step_can_be_pickled(monkeypatch):
    def compiled(function, examples):
        program = compiled_function.trace(function, examples).module()
        return lambda *arguments: program(*arguments)  # which pickle refuses

    monkeypatch.setattr(network_step, "CompiledFunction", compiled)
    agent = agent_of(compile=True)
    expected = actions(agent)
    assert agent.policy.network_step._programs
    agent.policy = pickle.loads(pickle.dumps(agent.policy))  # noqa: S301
    assert isinstance(agent.policy.network_step, CompiledStep)
    assert not agent.policy.network_step._programs
    np.testing.assert_array_equal(actions(agent), expected)


def test_an_evaluation_compiles_once(traced):
    """Its environments end one after the other, so the number of the running ones changes."""
    env = scripts([[0] * length + [1] for length in (1, 3, 5)])
    agent = small_agent(env, compile=True)
    assert evaluate(agent, env, episodes=3, deterministic=True).lengths.tolist() == [2, 4, 6]
    assert len(traced) == 1


@pytest.mark.thorough
@needs_compiler
@pytest.mark.slow
def test_compiled_steps_read_the_present_weights(compiled_agent):
    step = compiled_agent.policy.network_step
    assert isinstance(step, CompiledStep)
    assert largest_difference(compiled_agent, step, 300) < 1e-5
    with torch.no_grad():
        for parameter in compiled_agent.policy.parameters():
            parameter.mul_(1.3)
    assert largest_difference(compiled_agent, step) < 1e-5
    for parameter in compiled_agent.policy.parameters():
        parameter.data = parameter.data / 1.3
    assert largest_difference(compiled_agent, step) < 1e-5
    compiled_agent.policy.token.weight = torch.nn.Parameter(2 * compiled_agent.policy.token.weight.detach())
    assert largest_difference(compiled_agent, step) < 1e-5
    assert len(step._programs) == 1


def check_small_parameters(agent):
    """The compiler makes constants of tensors with few elements unless an option prevents it."""
    step = agent.policy.network_step
    assert largest_difference(agent, step) < 1e-5
    with torch.no_grad():
        for parameter in agent.policy.transformer.parameters():
            parameter += 0.5
    assert step._programs
    assert largest_difference(agent, step) < 1e-5


@needs_compiler
@pytest.mark.slow
def test_compiled_steps_read_the_present_values_of_small_parameters(compiled_agent):
    weights = deepcopy(compiled_agent.policy.state_dict())
    check_small_parameters(compiled_agent)
    compiled_agent.policy.load_state_dict(weights)


@needs_compiler
@pytest.mark.slow
def test_compiled_recurrence_reads_the_present_values_of_small_parameters():
    check_small_parameters(agent_of(core=CORES["recurrence"], compile=True))


class Scaled(nn.Module):
    """Product with a parameter of two elements."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        """Return the product."""
        return x * self.scale


@pytest.mark.thorough
@needs_compiler
@pytest.mark.slow
def test_a_program_with_constants_of_parameters_is_not_used(monkeypatch):
    program = compiled_function.PROGRAM.replace(', "always_keep_tensor_constants": True', "")
    assert program != compiled_function.PROGRAM
    monkeypatch.setattr(compiled_function, "PROGRAM", program)
    with pytest.raises(CompilationError, match="made constants of scale"):
        CompiledFunction(Scaled(), [torch.ones(3, 2)])


@needs_compiler
@pytest.mark.slow
def test_predict_and_rollouts_use_the_compiled_step(compiled_agent, monkeypatch):
    pickled = pickle.dumps(compiled_agent.policy)
    for copied in (deepcopy(compiled_agent.policy), pickle.loads(pickled)):  # noqa: S301
        assert isinstance(copied.network_step, CompiledStep)
        assert not copied.network_step._programs
    compiled_actions = actions(compiled_agent)
    monkeypatch.setattr(network_step, "eager_step", None)
    np.testing.assert_array_equal(actions(compiled_agent), compiled_actions)
    monkeypatch.undo()
    monkeypatch.setattr(compiled_agent.policy, "network_step", None)
    np.testing.assert_array_equal(actions(compiled_agent), compiled_actions)


def test_a_step_of_another_kind_of_device_is_not_compiled(monkeypatch):
    monkeypatch.setattr(network_step, "CompiledFunction", None)
    agent = agent_of()
    expected = actions(agent)
    agent.policy.network_step = CompiledStep("cuda")
    np.testing.assert_array_equal(actions(agent), expected)
    copied = deepcopy(agent.policy)
    assert copied.network_step.device_type == "cuda"


def test_an_exported_step_is_not_compiled(monkeypatch):
    monkeypatch.setattr(network_step, "CompiledFunction", None)
    step = GTrXLActingStep(agent_of(compile=True).policy, None, 2)
    with torch.no_grad():
        step(*step.arguments)


@needs_compiler
@pytest.mark.slow
def test_predict_does_not_change_the_state_that_it_is_given(compiled_agent):
    obs = sampled(compiled_agent.observation_space, ENVS)
    _, state = compiled_agent.predict(obs)
    before = {name: x.clone() for name, x in named_tensors(state).items()}
    first = compiled_agent.policy.action_logits(obs, state)[0]
    assert torch.equal(compiled_agent.policy.action_logits(obs, state)[0], first)
    assert all(torch.equal(x, before[name]) for name, x in named_tensors(state).items())


def assert_warns_and_acts_alike(agent, message):
    """Assert that an agent warns once that its step is not compiled, and acts as one that compiles none."""
    agent.policy.network_step = CompiledStep("cpu")
    with pytest.warns(UserWarning, match=message):
        given = actions(agent)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        actions(agent)
    agent.policy.network_step = None
    np.testing.assert_array_equal(given, actions(agent))


@pytest.mark.slow
def test_without_a_compiler_the_agent_warns(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert_warns_and_acts_alike(agent_of(), "the acting step is not compiled, because .*no-compiler")


def test_a_compilation_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(compiled_function, "TIME_LIMIT", 0.1)
    assert_warns_and_acts_alike(agent_of(), r"the compilation took longer than 0\.1 seconds")


def test_memory_with_state_in_python_is_named():
    core = replace(small_core(), memory=KNN(4, 6, 3), pattern=Window(5))
    assert_warns_and_acts_alike(agent_of(core=core), "the memory KNN.* has no compiled form")


class Conditional(FlattenExtractor):
    """Features that depend on a decision by values."""

    def forward(self, observations):
        """Return the features."""
        return super().forward(observations) * (2.0 if observations.sum() > 0 else 1.0)


def test_a_features_extractor_that_cannot_be_traced_is_named():
    agent = agent_of(policy_kwargs={"features_extractor_class": Conditional})
    assert_warns_and_acts_alike(
        agent, "because of the features extractor Conditional: torch.export cannot trace it"
    )


def test_nothing_is_printed_about_what_cannot_be_traced(capfd):
    agent = agent_of(policy_kwargs={"features_extractor_class": Conditional}, compile=True)
    with pytest.warns(UserWarning, match="features extractor Conditional"):
        agent.predict(sampled(agent.observation_space, ENVS))
    assert capfd.readouterr() == ("", "")


def test_a_compiled_step_names_a_position_without_a_vector(traced):
    core = replace(small_core(), position=LearnedAbsolute(10), memory=XL(4), pattern=Window(5))
    agent, obs, state = agent_of(core=core, compile=True), np.zeros((ENVS, 3), np.float32), None
    for _ in range(10):
        _, state = agent.predict(obs, state)
    assert traced
    with pytest.raises(ValueError, match=r"position 10 has no vector: .* raise max_length"):
        agent.predict(obs, state)


def test_compile_is_no_part_of_a_saved_agent(tmp_path):
    agent_of(compile=True).save(tmp_path / "agent")
    assert GTrXLPPO.load(tmp_path / "agent").policy.network_step is None
    again = GTrXLPPO.load(tmp_path / "agent", compile=True)
    assert isinstance(again.policy.network_step, CompiledStep)


def test_truncated_environments_are_not_compiled_separately(monkeypatch):
    """Their number varies from step to step."""
    numbers = []

    def record(step, policy, obs, action, index, cache):
        numbers.append(len(obs))

    monkeypatch.setattr(CompiledStep, "_step_for", record)
    agent = with_eager_updates(small_agent(scripts(shifted(3)), n_envs=3, compile=True))
    agent.learn(3 * 16)
    assert numbers == [3] * 17  # 16 steps, and the values after the last one


def test_evaluations_during_training_do_not_compile(monkeypatch):
    """They would compile the step for their own number of environments."""
    sizes = []

    def compiled_for(policy, obs, action, index, cache):
        sizes.append(len(action))
        return eager_step

    monkeypatch.setattr(network_step, "_CompiledFor", compiled_for)
    agent = with_eager_updates(agent_of(compile=True))
    callback = EvaluationCallback(scripts([MIXED] * 4), episodes=4, every_steps=8, budget=None)
    agent.learn(32, callback)
    assert callback.last.mean is not None
    assert set(sizes) == {ENVS}
