"""Saved agents are restored completely or rejected with a reason; existing files are never lost."""

import json
import pickle
import resource
import zipfile

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor

import rlxf
from rlxf import GTrXLPPO
from rlxf.agents.gtrxl import MlpGTrXLPolicy
from rlxf.agents.gtrxl.extractors import DictExtractor
from rlxf.training import CheckpointError, linear, read_archive, write_archive
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    IMAGE,
    OBSERVATIONS,
    VECTOR,
    Scripted,
    parameters,
    rollouts,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ROLLOUT = 3 * 16
STEADY = {"learning_rate": 1e-3, "ent_coef": 0.01}  # the default falls to 0 within a call of learn


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return an agent after two updates, and its file."""
    path = tmp_path_factory.mktemp("agent") / "agent.zip"
    agent = small_agent(scripts(shifted(3)), **STEADY).learn(2 * ROLLOUT)
    agent.save(path)
    return agent, path


def altered(source, target, change):
    """Return the file with changed content and valid checksums, as an attacker would write it."""
    archive = read_archive(source)
    change(archive.documents)
    write_archive(target, archive.documents, archive.tensors)
    return target


def acts_alike(first, second, steps=12):
    states = [None, None]
    for number in range(steps):
        obs = first.observation_space.sample()
        obs = {key: part[None] for key, part in obs.items()} if isinstance(obs, dict) else obs[None]
        starts = np.array([number % 5 == 0])
        results = [
            agent.predict(obs, state=state, episode_start=starts, deterministic=True)
            for agent, state in zip((first, second), states, strict=True)
        ]
        states = [state for _, state in results]
        if not np.array_equal(results[0][0], results[1][0]):
            return False
    return True


@pytest.mark.parametrize("policy", OBSERVATIONS)
@pytest.mark.parametrize("action_space", ["Box of two axes", "MultiDiscrete"])
def test_loaded_agent_acts_the_same(tmp_path, policy, action_space):
    env = scripts(shifted(2), OBSERVATIONS[policy], ACTIONS[action_space])
    agent = small_agent(env, policy, reconstruction_coef=0.1)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", device="cpu")
    assert same(parameters(agent), parameters(loaded))
    assert acts_alike(agent, loaded)
    assert not acts_alike(agent, small_agent(env, policy, loud=False))


def test_keys_that_torch_refuses_as_names_of_modules(tmp_path):
    space = spaces.Dict(
        {"arm.joint": VECTOR, "values": VECTOR, "": VECTOR, "camera.left": IMAGE, "eye": IMAGE}
    )
    agent = small_agent(scripts(shifted(3), space), "MultiInputGTrXLPolicy").learn(48)
    agent.save(tmp_path / "agent.zip")
    assert acts_alike(agent, GTrXLPPO.load(tmp_path / "agent.zip"))
    assert "features_extractor.extractors.eye.cnn.0.weight" in agent.policy.state_dict()


def test_parts_of_a_dict_have_the_order_of_the_space():
    """As in SB3: files of spaces that are not in alphabetical order depend on it."""
    space = spaces.Dict([("z", VECTOR), ("a", spaces.Box(-1, 1, (2,)))])
    observation = {key: torch.full((1, *part.shape), float(len(key))) for key, part in space.items()}
    observation["a"] *= 2
    ours, theirs = DictExtractor(space), CombinedExtractor(space)
    assert torch.equal(ours(observation), theirs(observation))


def test_keys_with_equal_names_of_modules_are_refused():
    with pytest.raises(ValueError, match="too similar: rename some"):
        DictExtractor(spaces.Dict({"a.b": VECTOR, "a%2Eb": VECTOR}))


def test_all_settings_are_restored(tmp_path):
    chosen = {
        "learning_rate": linear(1e-3, 1e-5),
        "n_steps": 12,
        "segment_length": 6,
        "batch_size": 18,
        "n_epochs": 2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "critic_lambda": 0.9,
        "clip_range": 0.1,
        "clip_range_vf": 0.5,
        "normalize_advantage": False,
        "ent_coef": linear(0.1, 0.0),
        "vf_coef": 0.3,
        "max_grad_norm": 0.7,
        "target_kl": 0.02,
        "advantage_epsilon": 0.1,
        "previous_action": False,
        "persist_memory_across_episodes": True,
        "recompute_memory": True,
        "reconstruction_coef": 0.2,
        "stats_window_size": 7,
        "tensorboard_log": str(tmp_path),
        "verbose": 0,
        "seed": 5,
        "policy_kwargs": {"log_std_init": -1.0, "features_extractor_class": FlattenExtractor},
    }
    agent = small_agent(scripts(shifted(3)), **chosen)
    agent.save(tmp_path / "agent.zip")
    loaded = GTrXLPPO.load(tmp_path / "agent.zip", device="cpu")
    for name in set(chosen) - {"learning_rate", "ent_coef", "stats_window_size", "tensorboard_log"}:
        assert getattr(loaded, name) == chosen[name], name
    for name in ("learning_rate", "ent_coef"):
        assert [getattr(loaded, name)(p) for p in (1.0, 0.3)] == [chosen[name](p) for p in (1.0, 0.3)]
    assert loaded.tensorboard_log is None, "a file does not decide where a log is written"
    assert loaded._stats_window_size == 7
    assert loaded.core == agent.core
    assert loaded.n_envs == 3
    assert loaded.rollout_buffer.hidden.shape == agent.rollout_buffer.hidden.shape


def test_training_continues_bit_for_bit(tmp_path):
    agent = small_agent(scripts(shifted(3)), **STEADY).learn(2 * ROLLOUT)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), device="cpu")
    without_optimizer = small_agent(scripts(shifted(3)), **STEADY)
    without_optimizer.policy.load_state_dict(agent.policy.state_dict())
    next(iter(rollouts(agent, 1)))
    for other in (loaded, without_optimizer):
        other.rollout_buffer = agent.rollout_buffer
        other.order.set_state(agent.order.get_state())
        other.set_logger(Logger(None, []))
    for each in (agent, loaded, without_optimizer):
        each.train()
    assert same(parameters(agent), parameters(loaded))
    assert not same(parameters(agent), parameters(without_optimizer))


def test_progress_is_restored(trained):
    agent, path = trained
    loaded = GTrXLPPO.load(path, scripts(shifted(3)), device="cpu")
    assert (loaded.num_timesteps, loaded._n_updates) == (2 * ROLLOUT, agent._n_updates)
    loaded.learn(ROLLOUT, reset_num_timesteps=False)
    assert loaded.num_timesteps == 3 * ROLLOUT


@pytest.mark.parametrize("number", [1, 5])
def test_loaded_for_another_number_of_environments(trained, number):
    agent, path = trained
    loaded = GTrXLPPO.load(path, scripts(shifted(number)), device="cpu")
    assert loaded.n_envs == number
    assert acts_alike(agent, loaded)
    loaded.learn(number * 16)


def test_set_env_after_loading_without_environment(trained):
    _, path = trained
    loaded = GTrXLPPO.load(path, device="cpu")
    loaded.set_env(scripts(shifted(3)))
    before = parameters(loaded)
    loaded.learn(ROLLOUT)
    assert not same(before, parameters(loaded))


def test_loaded_with_an_id(tmp_path):
    small_agent("rlxf/TMaze-v0").save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent.zip", env="rlxf/TMaze-v0", n_envs=2)
    assert loaded.n_envs == 2


def test_settings_override_those_of_file(trained):
    _, path = trained
    loaded = GTrXLPPO.load(path, scripts(shifted(3)), learning_rate=0.5, n_steps=8, gamma=0.5)
    assert (loaded.learning_rate, loaded.n_steps, loaded.gamma) == (0.5, 8, 0.5)


@pytest.mark.parametrize("wrong", [{"learning_rat": 1e-3}, {"n_step": 5}], ids=str)
def test_a_typo_in_a_setting(trained, wrong):
    with pytest.raises(TypeError, match=f"takes no argument '{next(iter(wrong))}'"):
        GTrXLPPO.load(trained[1], **wrong)


def test_a_setting_that_does_not_fit_the_weights(trained):
    message = "the core in the file has layers=2, the one passed layers=1; load without core"
    with pytest.raises(CheckpointError, match=message):
        GTrXLPPO.load(trained[1], core=small_core(layers=1))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            lambda: Scripted(observation_space=spaces.Box(-1, 1, (4,), np.float32)),
            r"another observation space: expected Box of shape \(3,\) .*, got Box of shape \(4,\)",
        ),
        (
            lambda: Scripted(observation_space=spaces.Box(-1, 2, (3,), np.float32)),
            r"observation space: expected the bounds \[-1.0, 1.0\] at index \(0,\), got \[-1.0, 2.0\]",
        ),
        (
            lambda: Scripted(action_space=spaces.Discrete(5)),
            r"another action space: expected Discrete\(3\), got Discrete\(5\)",
        ),
    ],
    ids=["shape", "bounds", "actions"],
)
def test_another_space(trained, env, message):
    with pytest.raises(ValueError, match=message):
        GTrXLPPO.load(trained[1], env())


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nothing.zip"):
        GTrXLPPO.load(tmp_path / "nothing")


@pytest.mark.faults
@pytest.mark.parametrize("part", np.linspace(0, 0.999, 12))
def test_a_truncated_file(trained, tmp_path, part):
    data = trained[1].read_bytes()
    (tmp_path / "cut.zip").write_bytes(data[: int(part * len(data))])
    with pytest.raises(CheckpointError, match=r"cut\.zip"):
        GTrXLPPO.load(tmp_path / "cut.zip")


@pytest.mark.faults
@pytest.mark.parametrize("part", np.linspace(0, 0.9999, 12))
def test_an_altered_byte(trained, tmp_path, part):
    data = bytearray(trained[1].read_bytes())
    data[int(part * len(data))] ^= 0x10
    (tmp_path / "bad.zip").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"bad\.zip"):
        GTrXLPPO.load(tmp_path / "bad.zip")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(200)], ids=str)
def test_a_foreign_file(tmp_path, content):
    (tmp_path / "foreign.zip").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"foreign\.zip"):
        GTrXLPPO.load(tmp_path / "foreign.zip")


@pytest.mark.parametrize("reader", ["load", "set_parameters"])
def test_a_file_of_stable_baselines3_is_not_opened(trained, tmp_path, reader):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(tmp_path / "sb3.zip")
    read = GTrXLPPO.load if reader == "load" else trained[0].set_parameters
    with pytest.raises(
        CheckpointError, match="Stable-Baselines3 file, which is not opened as it contains pickles"
    ):
        read(tmp_path / "sb3.zip")


def test_parameters_from_a_file(trained):
    agent, path = trained
    other = small_agent(scripts(shifted(3)), seed=99)
    other.set_parameters(path)
    assert same(parameters(agent), parameters(other))


def with_tensor(source, target, group, name, change):
    """Return the file with a tensor changed, or removed if the change returns None, and valid checksums."""
    archive = read_archive(source)
    tensor = change(archive.tensors[group].pop(name, torch.zeros(1)))
    archive.tensors[group] |= {} if tensor is None else {name: tensor}
    write_archive(target, archive.documents, archive.tensors)
    return target


@pytest.mark.parametrize(
    ("group", "name", "change", "message"),
    [
        (
            "policy",
            "token.weight",
            lambda weight: weight[:-1],
            r"policy.*'token.weight' has shape \(\d+, 3\), not",
        ),
        ("policy", "token.weight", lambda weight: weight[None], r"policy.*'token.weight' has shape \(1, "),
        ("policy", "token.weight", lambda weight: None, "policy lacks the tensor 'token.weight'"),
        (
            "policy",
            "stranger",
            torch.clone,
            "policy has a tensor 'stranger', which the agent does not have",
        ),
        ("optimizer", "0.exp_avg", lambda moment: moment[..., :-1], "optimizer.*'0.exp_avg' has shape"),
        ("optimizer", "999.exp_avg", torch.clone, "optimizer has a tensor '999.exp_avg'.*no parameter"),
        ("optimizer", "one.exp_avg", torch.clone, "optimizer has a tensor 'one.exp_avg'.*no parameter"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(trained, tmp_path, group, name, change, message):
    path = with_tensor(trained[1], tmp_path / "other.zip", group, name, change)
    agent = small_agent(scripts(shifted(3)))
    before = parameters(agent)
    with pytest.raises(CheckpointError, match=message):
        agent.set_parameters(path)
    assert same(parameters(agent), before)
    with pytest.raises(CheckpointError, match=message):
        GTrXLPPO.load(path)


@pytest.mark.parametrize(("writer", "named"), [("7.1.0", "rlxf 7.1.0"), (None, "an unknown version of rlxf")])
def test_newer_file_is_reported_with_unknown_settings(trained, tmp_path, writer, named):
    def change(documents):
        documents["agent"]["rlxf"] = writer
        documents["agent"]["settings"]["dreams"] = 5

    path = altered(trained[1], tmp_path / "newer.zip", change)
    with pytest.raises(
        CheckpointError, match=f"written by {named}.*dreams.*{rlxf.__version__}.*load it with"
    ):
        GTrXLPPO.load(path)


def test_file_names_its_version(trained):
    assert read_archive(trained[1]).documents["agent"]["rlxf"] == rlxf.__version__


def swap(key, value):
    return lambda documents: documents["agent"].update({key: value})


def unknown_technique(documents):
    documents["agent"]["settings"]["core"]["position"] = {"name": "Compass", "points": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda documents: documents.update(agent=["GTrXLPPO"]), "contains no GTrXLPPO agent"),
        (lambda documents: documents.update(agent="GTrXLPPO"), "contains no GTrXLPPO agent"),
        (lambda documents: documents.pop("agent"), "contains no GTrXLPPO agent"),
        (swap("name", "DecisionTransformer"), "contains no GTrXLPPO agent"),
        (unknown_technique, "cannot build its agent.*Compass"),
        (swap("settings", []), r"settings is \[\], not an object"),
        (swap("settings", {}), "settings lacks 'learning_rate'"),
        (swap("observation_space", {"type": "Sphere"}), "cannot build its agent.*Sphere"),
        (swap("progress", {}), "progress lacks 'num_timesteps'"),
        (swap("policy", ["MlpGTrXLPolicy"]), "policy must be the name of a class"),
        (
            lambda documents: documents["agent"]["settings"].update(
                policy_kwargs={"a": {"class": "os.system"}}
            ),
            "cannot build its agent.*os.system",
        ),
    ],
)
def test_intact_file_with_invalid_description(trained, tmp_path, change, message):
    path = altered(trained[1], tmp_path / "other.zip", change)
    with pytest.raises(CheckpointError, match=message):
        GTrXLPPO.load(path)


def test_a_file_without_tensors(tmp_path):
    write_archive(tmp_path / "x.zip", {"agent": {"name": "GTrXLPPO"}}, {})
    with pytest.raises(CheckpointError, match="contains no GTrXLPPO agent"):
        GTrXLPPO.load(tmp_path / "x.zip")


class OwnExtractor(FlattenExtractor):
    """User-defined class, which a file cannot hold."""


class OwnPolicy(MlpGTrXLPolicy):
    """User-defined policy, which a file cannot hold."""


def test_user_defined_policy_with_the_name_of_another_must_be_passed_again(trained, tmp_path):
    policy = type("MlpGTrXLPolicy", (MlpGTrXLPolicy,), {"__module__": "mine"})
    GTrXLPPO(policy, scripts(shifted(3)), core=small_core(), device="cpu").save(tmp_path / "agent")
    with pytest.raises(
        CheckpointError, match=r"user-defined policy, mine\.MlpGTrXLPolicy; pass policy=mine\."
    ):
        GTrXLPPO.load(tmp_path / "agent")
    assert type(GTrXLPPO.load(tmp_path / "agent", policy=policy).policy) is policy
    assert type(GTrXLPPO.load(trained[1]).policy) is MlpGTrXLPolicy


@pytest.mark.parametrize(
    "change",
    [{"memory_length": 4}, {"previous_action": False}, {"use_sde": True}, {"reconstruction_coef": 0.5}],
    ids=str,
)
def test_an_argument_that_changes_the_network_is_named(trained, change):
    ((name, value),) = change.items()
    message = rf"cannot be loaded with {name}={value}, .* saved with {name}=.*can be replaced: .*, gamma, "
    with pytest.raises(ValueError, match=message):
        GTrXLPPO.load(trained[1], **change)
    GTrXLPPO.load(trained[1], memory_length=8, previous_action=True, use_sde=False)


@pytest.mark.parametrize(("chosen", "loaded"), [(None, 2048), (64, 64)], ids=["default", "chosen"])
def test_default_size_of_rollouts_fits_the_environments(tmp_path, chosen, loaded):
    sizes = {"segment_length": 64, "batch_size": 64, "n_steps": chosen}
    small_agent(scripts(shifted(32)), **sizes).save(tmp_path / "agent")
    assert GTrXLPPO.load(tmp_path / "agent").n_steps == 64
    assert GTrXLPPO.load(tmp_path / "agent", Scripted()).n_steps == loaded


def test_user_defined_extractor_must_be_passed_again(tmp_path):
    kwargs = {"features_extractor_class": OwnExtractor}
    agent = small_agent(scripts(shifted(3)), policy_kwargs=kwargs)
    agent.save(tmp_path / "agent")
    with pytest.raises(
        CheckpointError, match=r"features_extractor_class.* was .*OwnExtractor.*pass policy_kwargs"
    ):
        GTrXLPPO.load(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", policy_kwargs=kwargs, device="cpu")
    assert isinstance(loaded.policy.features_extractor, OwnExtractor)
    assert acts_alike(agent, loaded)


class Configured(FlattenExtractor):
    """Extractor that accepts any argument."""

    def __init__(self, observation_space, parts=()):
        super().__init__(observation_space)


@pytest.mark.parametrize(
    "parts",
    [[torch.nn.ReLU], {"inner": torch.nn.ReLU}, (object(),)],
    ids=["in a list", "in a dict", "in a tuple"],
)
def test_lost_object_is_reported_at_any_depth(tmp_path, parts):
    kwargs = {"features_extractor_class": Configured, "features_extractor_kwargs": {"parts": parts}}
    small_agent(scripts(shifted(3)), policy_kwargs=kwargs).save(tmp_path / "agent")
    path = altered(
        tmp_path / "agent.zip",
        tmp_path / "known.zip",
        lambda documents: documents["agent"]["settings"]["policy_kwargs"].pop("features_extractor_class"),
    )
    with pytest.raises(CheckpointError, match=r"features_extractor_kwargs.* was .*pass policy_kwargs"):
        GTrXLPPO.load(path)


def test_known_classes_are_restored(tmp_path):
    kwargs = {
        "optimizer_class": torch.optim.AdamW,
        "optimizer_kwargs": {"betas": (0.8, 0.9), "weight_decay": 0.1},
    }
    small_agent(scripts(shifted(3)), policy_kwargs=kwargs).learn(ROLLOUT).save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), device="cpu").learn(ROLLOUT)
    assert type(loaded.policy.optimizer) is torch.optim.AdamW
    assert loaded.policy.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_optimizer_whose_state_holds_numbers(tmp_path):
    kwargs = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
    agent = small_agent(scripts(shifted(3)), policy_kwargs=kwargs, **STEADY).learn(ROLLOUT)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), device="cpu", policy_kwargs=kwargs)
    states = [each.policy.optimizer.state_dict()["state"][0] for each in (agent, loaded)]
    assert states[0]["step"] == states[1]["step"] > 0
    loaded.learn(ROLLOUT)


def test_replaced_optimizer_is_reported(tmp_path):
    agent = small_agent(scripts(shifted(3)), **STEADY)
    agent.policy.optimizer = torch.optim.SGD(agent.policy.parameters(), lr=1e-3, momentum=0.9)
    with pytest.warns(
        UserWarning, match="is SGD, .* built with Adam, .*policy_kwargs={'optimizer_class': SGD"
    ):
        agent.learn(ROLLOUT).save(tmp_path / "agent")
    kwargs = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}
    loaded = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), device="cpu", policy_kwargs=kwargs)
    assert same(parameters(agent), parameters(loaded.learn(0)))


def test_user_defined_policy_must_be_passed_again(tmp_path):
    agent = small_agent(scripts(shifted(3)), loud=False)
    own = GTrXLPPO(
        OwnPolicy, scripts(shifted(3)), core=small_core(), n_steps=16, segment_length=4, batch_size=16
    )
    own.set_parameters(agent.get_parameters())
    own.save(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="user-defined policy, OwnPolicy; pass policy=OwnPolicy"):
        GTrXLPPO.load(tmp_path / "agent")
    assert acts_alike(GTrXLPPO.load(tmp_path / "agent", policy=OwnPolicy, device="cpu"), agent)


class DeepHeads(MlpGTrXLPolicy):
    """Policy with a hidden layer in the action head."""

    def build_heads(self, log_std_init):
        super().build_heads(log_std_init)
        hidden = torch.nn.Linear(self.core.width, self.core.width)
        self.action_net = torch.nn.Sequential(hidden, torch.nn.Tanh(), self.action_net)


@pytest.mark.parametrize("kind", ["Discrete", "Box of two axes"])
def test_user_defined_heads_are_trained_and_stored(tmp_path, kind):
    env = scripts(shifted(3), action_space=ACTIONS[kind])
    sizes = {"n_steps": 16, "segment_length": 4, "batch_size": 16, "learning_rate": 1e-2}
    agent = GTrXLPPO(DeepHeads, env, core=small_core(), device="cpu", seed=0, **sizes)
    hidden = agent.policy.action_net[0].weight
    before = hidden.detach().clone()
    agent.learn(2 * ROLLOUT)
    assert not torch.equal(hidden, before)
    agent.save(tmp_path / "agent")
    assert acts_alike(GTrXLPPO.load(tmp_path / "agent", policy=DeepHeads, device="cpu"), agent)


def test_user_defined_schedule_must_be_passed_again(tmp_path):
    def schedule(progress):
        return 1e-3 * progress**2

    agent = small_agent(scripts(shifted(3)), learning_rate=schedule)
    agent.save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), device="cpu")
    assert acts_alike(agent, loaded)
    with pytest.raises(ValueError, match=r"user-defined schedule.*pass this schedule again"):
        loaded.learn(2 * ROLLOUT)
    assert loaded.num_timesteps == 0, "found before the first step"
    passed = GTrXLPPO.load(tmp_path / "agent", scripts(shifted(3)), learning_rate=schedule)
    assert passed.learn(2 * ROLLOUT).learning_rate is schedule


def test_numpy_numbers_can_be_stored(tmp_path):
    settings = {
        "gamma": np.float32(0.5),
        "n_epochs": np.int32(2),
    }
    kwargs = {"log_std_init": np.float32(-1)}
    small_agent(scripts(shifted(3)), **settings, policy_kwargs=kwargs).save(tmp_path / "agent")
    loaded = GTrXLPPO.load(tmp_path / "agent")
    assert (loaded.gamma, loaded.n_epochs) == (0.5, 2)


@pytest.mark.faults
def test_a_full_disk_leaves_the_old_file(trained, tmp_path):
    agent, path = trained
    target = tmp_path / "agent.zip"
    target.write_bytes(path.read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*agent\.zip .*an existing file is unchanged"):
            agent.save(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_bytes() == path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["agent.zip"]
    GTrXLPPO.load(target)


def test_missing_folders_are_made(trained, tmp_path):
    trained[0].save(tmp_path / "a" / "b" / "agent")
    assert (tmp_path / "a" / "b" / "agent.zip").is_file()


@pytest.mark.parametrize(
    "words",
    [{"exclude": ["policy"]}, {"exclude": ["policy.optimizer", "env"]}, {"include": ["env"]}],
    ids=str,
)
def test_other_parts_cannot_be_excluded_or_included(trained, tmp_path, words):
    with pytest.raises(ValueError, match=r"except for exclude=\['policy.optimizer'\], got"):
        trained[0].save(tmp_path / "agent", **words)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def small(trained, tmp_path):
    """File of a trained agent without the state of its optimizer."""
    trained[0].save(tmp_path / "small.zip", exclude=["policy.optimizer"])
    return tmp_path / "small.zip"


def test_agent_without_the_optimizer_has_equal_weights_and_can_be_trained(trained, small, tmp_path):
    agent, _ = trained
    agent.save(tmp_path / "whole.zip")
    assert small.stat().st_size < 0.5 * (tmp_path / "whole.zip").stat().st_size
    loaded = GTrXLPPO.load(small, env=agent.get_env())
    for name, tensor in agent.policy.state_dict().items():
        assert torch.equal(tensor, loaded.policy.state_dict()[name])
    assert not loaded.policy.optimizer.state
    assert loaded.num_timesteps == agent.num_timesteps
    loaded.learn(loaded.n_steps * loaded.n_envs)
    assert loaded.policy.optimizer.state
    loaded.set_parameters(small)
    assert not loaded.policy.optimizer.state


def test_run_cannot_be_resumed_from_a_file_without_the_optimizer(trained, small):
    with pytest.raises(CheckpointError, match=r"was saved with exclude=\['policy.optimizer'\]"):
        trained[0].learn(10**6, resume_from=small)


@pytest.mark.parametrize("excluded", [[], ["policy"], "policy.optimizer", None, {}, 1], ids=str)
def test_malformed_list_of_excluded_parts_is_refused(small, excluded):
    archive = read_archive(small)
    archive.documents["agent"]["excluded"] = excluded
    write_archive(small, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError):
        GTrXLPPO.load(small)


def test_excluded_optimizer_with_tensors_is_refused(trained, tmp_path):
    trained[0].save(tmp_path / "whole.zip")
    archive = read_archive(tmp_path / "whole.zip")
    archive.documents["agent"]["excluded"] = ["policy.optimizer"]
    write_archive(tmp_path / "hostile.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError):
        GTrXLPPO.load(tmp_path / "hostile.zip")


def test_no_pickle_is_written_or_read(trained, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    agent, _ = trained
    for module, names in ((pickle, ("dump", "dumps", "load", "loads")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    agent.save(tmp_path / "agent")
    GTrXLPPO.load(tmp_path / "agent")
    with zipfile.ZipFile(tmp_path / "agent.zip") as archive:
        members = set(archive.namelist())
        assert members == {"agent.json", "policy.safetensors", "optimizer.safetensors", "manifest.json"}
        assert json.loads(archive.read("agent.json"))["name"] == "GTrXLPPO"


def test_a_seed_gives_the_same_file(tmp_path):
    files = []
    for name in ("first", "second"):
        env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        small_agent(env, n_envs=2).learn(2 * 16).save(tmp_path / name)
        files.append((tmp_path / f"{name}.zip").read_bytes())
    assert files[0] == files[1]


def test_a_policy_alone_is_neither_pickled_nor_unpickled(tmp_path):
    policy = small_agent(scripts(shifted(3))).policy
    with pytest.raises(TypeError, match="save the agent"):
        policy.save(str(tmp_path / "policy.pth"))
    with pytest.raises(TypeError, match="load the agent"):
        type(policy).load(str(tmp_path / "policy.pth"))
    assert not list(tmp_path.iterdir())
