"""Hyperparameters of an agent: types and ranges, and TensorBoard's HPARAMS tab."""

import inspect
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from rlxf import GTrXLPPO
from rlxf.agents.common.checkpoint import setting_rules
from rlxf.agents.gtrxl import config
from rlxf.agents.gtrxl.checkpoint import setting_names
from rlxf.agents.gtrxl.hyperparameters import hyperparameters as agent_hyperparameters
from rlxf.envs import make_vec_env
from rlxf.training import CheckpointError
from rlxf.training.strict_json import dump_json, load_json
from tests.agents.gtrxl.worlds import scripts, shifted, small_agent

ELSEWHERE = {"policy", "env", "core", "memory_length", "device", "policy_kwargs"}
NOT_OF_LEARNING = {
    "tensorboard_log",
    "stats_window_size",
    "verbose",
    "compile",
    "cuda_graphs",
    "_init_setup_model",
}


def tmaze(n_envs: int = 2):
    return make_vec_env("rlxf/TMaze-v0", n_envs, seed=0, env_kwargs={"corridor_length": 4})


def logged(folder: Path, tag: str) -> HParamsPluginData:
    """Return the data of a tag of the plug-in."""
    content = EventAccumulator(str(folder)).Reload().summary_metadata[tag].plugin_data.content
    return HParamsPluginData.FromString(content)


def times_written(folder: Path, tag: str) -> int:
    files = folder.glob("events.out.tfevents.*")
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return sum(value.tag == tag for event in events for value in event.summary.value)


def hyperparameters(agent: GTrXLPPO) -> dict[str, object]:
    """Return the hyperparameters that a training logs."""
    return agent_hyperparameters(agent.constructor_settings(), "GTrXLPPO", "MlpGTrXLPolicy", agent.env)


def test_training_logs_hyperparameters_once(tmp_path):
    agent = small_agent(tmaze(), tensorboard_log=str(tmp_path), target_kl=0.5)
    agent.learn(64)
    folder = tmp_path / "GTrXLPPO_1"
    session = logged(folder, SESSION_START_INFO_TAG).session_start_info.hparams
    assert session["gamma"].number_value == 0.99
    assert session["learning_rate"].string_value == "linear:0.001:0.0"
    assert session["target_kl"].number_value == 0.5
    assert session["residual"].string_value == "GRUGate(bias=2.0)"
    assert session["env"].string_value == "rlxf/TMaze-v0"
    assert times_written(folder, SESSION_START_INFO_TAG) == 1


def test_all_settings_are_logged():
    agent = small_agent(tmaze())
    values = hyperparameters(agent)
    arguments = set(inspect.signature(GTrXLPPO).parameters) - ELSEWHERE - NOT_OF_LEARNING
    assert {name for name in arguments if getattr(agent, name) is not None} <= set(values)
    assert (values["width"], values["memory_length"]) == (16, 8)
    assert values["algorithm"] == "GTrXLPPO"


def test_all_values_are_supported_by_tensorboard():
    agent = small_agent(
        tmaze(),
        gamma=np.float32(0.5),
        clip_range=lambda progress: 0.1 * progress,
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-3}},
    )
    values = hyperparameters(agent)
    assert all(type(value) in (bool, int, float, str) for value in values.values())
    assert values["gamma"] == 0.5
    assert values["clip_range"] == "custom:0.1"
    assert values["policy_kwargs.optimizer_kwargs"] == "{'eps': 0.001}"


def test_environment_with_spec_is_logged():
    for env in (tmaze(), VecNormalize(tmaze()), "CartPole-v1"):
        values = hyperparameters(small_agent(env))
        assert values["env"] == ("CartPole-v1" if env == "CartPole-v1" else "rlxf/TMaze-v0")
    assert hyperparameters(small_agent(tmaze()))["env.corridor_length"] == 4
    assert "env" not in hyperparameters(small_agent(scripts(shifted(2))))


def test_logger_without_tensorboard_is_unchanged(tmp_path):
    agent = small_agent(tmaze())
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent._setup_learn(64)
    assert not list(tmp_path.glob("events.out.tfevents.*"))
    assert not agent.logger.name_to_value


VALUES = (
    *(True, np.bool_(False), None, "4", [4]),
    *(-1, 0, 1, 8, 2**40, np.int64(8), 4.0, np.float64(16)),
    *(0.5, np.float32(0.1), 1.5, math.nan, math.inf, -math.inf),
)


FIELDS = [field.name for field in fields(config.PPOConfig)]


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if name not in ("precision", "compile", "cuda_graphs")]
)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_accepted_values_can_be_stored_and_others_are_named(name, value):
    rule = setting_rules(GTrXLPPO, setting_names(GTrXLPPO), config.BOUNDS)[name]
    built, error = config_or_error(name, value)
    if built is None:
        shown = value.item() if isinstance(value, np.generic) else value
        assert name in error
        assert f"{shown:g}" in error if isinstance(shown, float) else str(shown) in error
        return
    stored = getattr(built, name)
    assert rule.holds(stored) or (stored is None and name in ("n_steps", "batch_size"))
    assert load_json(dump_json(stored)) == stored == value


def config_or_error(name, value) -> tuple[config.PPOConfig | None, str]:
    """Return a configuration with this argument, or the message with which it is refused."""
    try:
        return config.PPOConfig(**({"segment_length": 4} | {name: value})), ""
    except (TypeError, ValueError) as error:
        return None, str(error)


def test_numbers_of_other_types_are_converted_saved_and_loaded(tmp_path):
    numbers = {"n_epochs": 2.0, "batch_size": np.int64(8), "gamma": np.float32(0.5), "seed": 3.0}
    numbers |= {"learning_rate": np.float32(0.25), "stats_window_size": 7.0, "verbose": np.uint8(0)}
    agent = small_agent(tmaze(), **numbers)
    settings = agent.constructor_settings()
    assert {name: settings[name] for name in numbers} == numbers
    assert not any(isinstance(settings[name], np.generic) for name in numbers)
    agent.save(tmp_path / "agent.zip")
    assert GTrXLPPO.load(tmp_path / "agent.zip", device="cpu")._description() == agent._description()


def test_nonfinite_numbers_of_policy_kwargs_must_be_passed_again(tmp_path):
    kwargs = {"optimizer_kwargs": {"eps": math.inf}}
    small_agent(tmaze(), policy_kwargs=kwargs).save(tmp_path / "agent.zip")
    with pytest.raises(
        CheckpointError, match=r"\['eps'\] was inf, which a file cannot hold; pass policy_kwargs"
    ):
        GTrXLPPO.load(tmp_path / "agent.zip")
    GTrXLPPO.load(tmp_path / "agent.zip", policy_kwargs=kwargs)
