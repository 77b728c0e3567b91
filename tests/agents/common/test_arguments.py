"""Arguments: unknown and unsupported keywords, devices, and the warning for a missing state."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure

from rlxf import DecisionTransformer, GTrXLPPO, evaluate, import_sb3
from rlxf.agents.common.arguments import (
    UnsupportedArgument,
    check_device,
    load_settings,
    reject_unknown_arguments,
)
from rlxf.agents.common.predict_state import PATIENCE, MissingStateWarning
from tests.agents.decision_transformer.worlds import shown, some_trajectories
from tests.agents.decision_transformer.worlds import small_agent as small_transformer
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent


class Learner:
    @reject_unknown_arguments({"use_sde": UnsupportedArgument("use noise instead", neutral=(False,))})
    def __init__(self, width: int, noise: float = 0.5, _hidden: bool = True):
        self.width, self.noise = width, noise


def test_signature_is_preserved():
    assert list(inspect.signature(Learner).parameters) == ["width", "noise", "_hidden"]


def test_rejected_keyword_names_alternative():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'use_sde': use noise instead$"):
        Learner(3, use_sde=True)


def test_neutral_value_is_accepted():
    assert Learner(3, use_sde=False).width == 3


def test_typo_names_most_similar_parameter():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'nois'; did you mean noise\?$"):
        Learner(3, nois=1.0)


def test_an_unknown_keyword_lists_the_public_parameters():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'xyz'; it takes width, noise$"):
        Learner(3, xyz=1.0)


def test_known_arguments_reach_the_function():
    assert vars(Learner(width=3, noise=0.1)) == {"width": 3, "noise": 0.1}


def test_custom_objects_are_constructor_arguments_and_keywords_win():
    given = {"custom_objects": {"gamma": 0.5, "n_steps": 4, "policy_class": int}, "gamma": 0.9}
    assert load_settings(given) == {"gamma": 0.9, "n_steps": 4, "policy": int}


def test_learning_rate_of_custom_objects():
    """Programs for SB3 pass both, as its warnings advise."""
    only = {"lr_schedule": 0.1}
    assert load_settings({"custom_objects": only}) == {"learning_rate": 0.1}
    assert load_settings({"custom_objects": {"learning_rate": 0.2} | only}) == {"learning_rate": 0.2}
    assert load_settings({"custom_objects": only, "learning_rate": 0.3}) == {"learning_rate": 0.3}
    assert only == {"lr_schedule": 0.1}


def test_system_info_is_printed(capsys):
    assert load_settings({"print_system_info": True}) == {}
    assert "PyTorch" in capsys.readouterr().out
    load_settings({"print_system_info": False})
    assert not capsys.readouterr().out


def test_force_reset_false_is_rejected():
    assert load_settings({"force_reset": True}) == {}
    with pytest.raises(ValueError, match=r"force_reset=False is not possible.*resume_from=FILE"):
        load_settings({"force_reset": False})


def gpus(monkeypatch, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_no_gpu(monkeypatch, device):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"requires a GPU .*: torch finds none .* use device='cpu'"):
        check_device(device)


def test_too_few_gpus(monkeypatch):
    gpus(monkeypatch, 2)
    check_device("cuda:1")
    with pytest.raises(ValueError, match=r"device='cuda:2' requires a GPU .*: torch finds 2"):
        check_device("cuda:2")


@pytest.mark.parametrize("device", ["auto", "cpu", "meta", torch.device("cpu")], ids=str)
def test_devices_that_need_no_gpu(monkeypatch, device):
    gpus(monkeypatch, 0)
    check_device(device)


def test_no_such_device():
    with pytest.raises(ValueError, match=r"device must be 'auto', 'cpu' or 'cuda', got 'gpu'"):
        check_device("gpu")


def test_an_agent_does_not_fall_back_to_the_cpu(monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"requires a GPU"):
        GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", device="cuda")
    GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=8, device="auto").save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"requires a GPU"):
        GTrXLPPO.load(tmp_path / "agent", device="cuda")


def test_an_imported_agent_does_not_fall_back_to_the_cpu(monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="requires a GPU"):
        import_sb3(tmp_path / "agent.zip", trust=True, device="cuda")


FORGOTTEN = "acts without memory"
OBSERVATION = np.zeros((2, 3), np.float32)


def warning_files(play):
    """Return the files that the warnings point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play()
    return [each.filename for each in caught if FORGOTTEN in str(each.message)]


@pytest.fixture
def agent():
    return small_agent(scripts(shifted(2)))


def test_dropped_state_warns_once(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION)

    assert warning_files(play) == [__file__]
    assert warning_files(play) == []


def test_few_independent_observations_do_not_warn(agent):
    def play():
        for _ in range(PATIENCE - 1):
            agent.predict(OBSERVATION)

    assert warning_files(play) == []


def test_no_warning_with_episode_start(agent):
    def play():
        for _ in range(3 * PATIENCE):
            agent.predict(OBSERVATION, episode_start=np.ones(2, bool))

    assert warning_files(play) == []


def test_missing_state_in_continuing_episode_warns(agent):
    assert len(warning_files(lambda: agent.predict(OBSERVATION, episode_start=np.array([True, False])))) == 1


def test_new_episodes_without_state_do_not_warn(agent):
    def play():
        for _ in range(2 * PATIENCE):
            _, state = agent.predict(OBSERVATION)
            agent.predict(OBSERVATION, state)

    assert warning_files(play) == []


@pytest.mark.parametrize("tool", [evaluate, evaluate_policy])
def test_tools_that_pass_the_state_do_not_warn(agent, tool):
    assert warning_files(lambda: tool(agent, scripts(shifted(2)), 20)) == []


def test_decision_transformer_uses_time_steps():
    data = some_trajectories()
    agent = small_transformer(data)
    first, later = (shown(data, np.array([step])) for step in (0, 4))

    def play(observation):
        for _ in range(3 * PATIENCE):
            agent.predict(observation)

    assert warning_files(lambda: play(first)) == []
    assert warning_files(lambda: play(later)) == [__file__]


def test_decision_transformer_with_episode_start():
    data = some_trajectories()
    later = shown(data, np.array([4]))
    given = {"episode_start": np.array([False])}
    assert len(warning_files(lambda: small_transformer(data).predict(later, **given))) == 1


def test_calls_with_a_state_start_the_count_again():
    calls = MissingStateWarning()

    def play():
        for state in ([None] * (PATIENCE - 1) + ["state"]) * 3:
            calls.record(state, None)

    assert warning_files(play) == []


def test_starts_are_not_read_if_there_is_a_state():
    """Reading a mask would wait for an accelerator in each step."""
    unreadable = torch.ones(2, dtype=torch.bool, device="meta")
    MissingStateWarning().record_start("state", unreadable, given=True)


@pytest.mark.parametrize("number", [1e2, np.int64(100)], ids=repr)
def test_agents_trained_for_a_whole_number_of_another_type_are_loaded(tmp_path, number):
    online, offline = small_agent(scripts(shifted(3))), small_transformer()
    for agent in (online.learn(number), offline.learn(number / 10)):
        agent.save(tmp_path / "agent")
        assert type(agent).load(tmp_path / "agent")._total_timesteps == agent._total_timesteps


@pytest.mark.parametrize("number", [-1, 48.5, math.nan, True, "48"], ids=repr)
def test_no_training_starts_with_another_number_of_steps(number):
    student, teacher = small_agent(scripts(shifted(3))), small_agent(scripts(shifted(3)))
    offline = small_transformer()
    trainings = (student.learn, lambda steps: student.distill(teacher, steps), offline.learn)
    for learn in trainings:
        with pytest.raises((TypeError, ValueError), match="steps must be"):
            learn(number)
    assert (student.num_timesteps, offline.num_timesteps) == (0, 0)


@pytest.mark.parametrize("interval", [0, -1, 1.5, "1"], ids=repr)
def test_log_interval_out_of_range(interval):
    for agent in (small_agent(scripts(shifted(3))), small_transformer()):
        with pytest.raises((TypeError, ValueError), match="log_interval must be"):
            agent.learn(48, log_interval=interval)
        assert agent.num_timesteps == 0


def test_log_interval_none_logs_nothing(tmp_path):
    for agent in (small_agent(scripts(shifted(3))), small_transformer()):
        agent.set_logger(configure(str(tmp_path), ["csv"]))
        agent.learn(96, log_interval=None)
        assert agent.num_timesteps == 96
        assert (tmp_path / "progress.csv").read_text() == ""


AGENTS = {"GTrXLPPO": lambda: small_agent(scripts(shifted(3))), "DecisionTransformer": small_transformer}


@pytest.fixture(params=AGENTS)
def agent_maker(request):
    return AGENTS[request.param]


def assert_refused(agent_maker, file, match):
    """Neither the constructor nor `load` builds an agent."""
    with pytest.raises(RuntimeError, match=match):
        agent_maker()
    for kind in (GTrXLPPO, DecisionTransformer):
        with pytest.raises(RuntimeError, match=match):
            kind.load(file)


def test_another_default_dtype_of_torch_is_refused(agent_maker, tmp_path):
    """Weights would have another dtype than observations, and the first update would fail."""
    torch.set_default_dtype(torch.float64)
    try:
        assert_refused(
            agent_maker, tmp_path, r"is torch\.float64, .* call torch\.set_default_dtype\(torch\.f"
        )
    finally:
        torch.set_default_dtype(torch.float32)
    agent_maker()


def test_a_default_device_of_torch_is_refused(agent_maker, tmp_path, monkeypatch):
    """Random numbers of a CPU generator could not be drawn on it."""
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda:0"))
    assert_refused(agent_maker, tmp_path, r"is cuda:0, .*set_default_device\('cpu'\) .* pass device='cuda'")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_training_without_gradients_is_refused_before_its_first_step(agent_maker, context):
    agent = agent_maker()
    with context(), pytest.raises(RuntimeError, match=r"call learn outside of torch\.no_grad\(\)"):
        agent.learn(100)
    assert agent.num_timesteps == 0
