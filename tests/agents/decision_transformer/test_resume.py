"""Tests of resumed training, which is bitwise equal to an uninterrupted run."""

from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import MaximumEntropy
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import CALM, LSH, RFA, Performer, RoPE, Routing
from rlxf.training import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    ResumeError,
    linear,
    read_archive,
    write_archive,
)
from tests.agents.decision_transformer.worlds import ACTIONS, CORES, small_agent, some_trajectories

STEPS, LOG = 7, 3


class RecordingWriter(KVWriter):
    """Log writer that records all values except times."""

    def __init__(self):
        self.lines = {}

    def write(self, key_values, key_excluded, step=0):
        assert step not in self.lines
        self.lines[step] = {key: value for key, value in key_values.items() if not key.startswith("time/")}

    def close(self):
        pass


class SaveAt(BaseCallback):
    """Callback that saves after ``step`` updates, and stops the training if ``stop`` is True."""

    def __init__(self, step, path, stop):
        super().__init__()
        self.step, self.path, self.stop = step, path, stop

    def _on_step(self):
        if self.num_timesteps == self.step:
            self.model.save(self.path)
            return not self.stop
        return True


def logged(agent):
    writer = RecordingWriter()
    agent.set_logger(Logger(None, [writer]))
    return writer.lines


def assert_same(one, other):
    a, b = one.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (agent.optimizer.state_dict()["state"] for agent in (one, other))
    assert all(torch.equal(a[number][name], b[number][name]) for number in a for name in a[number])
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    assert one.num_timesteps == other.num_timesteps


@pytest.fixture(autouse=True)
def _fast_bfloat16(monkeypatch):
    """Suppress the warning about devices that emulate bfloat16."""
    monkeypatch.setattr("rlxf.agents.common.precision._emulates_bfloat16", lambda device: False)


def assert_resumes(fresh, tmp_path, cut):
    """Compare an uninterrupted run with one stopped after ``cut`` updates and resumed by a new agent."""
    uninterrupted = fresh()
    expected = logged(uninterrupted)
    uninterrupted.learn(STEPS, log_interval=LOG)
    stopped = fresh()
    lines = logged(stopped)
    stopped.learn(STEPS, SaveAt(cut, tmp_path / "cut.zip", stop=True), log_interval=LOG)
    assert stopped.num_timesteps == cut
    torch.manual_seed(99)  # a new process has other generator states
    resumed = fresh()
    torch.manual_seed(98)
    lines |= logged(resumed)
    resumed.learn(STEPS, log_interval=LOG, resume_from=tmp_path / "cut.zip")
    assert_same(uninterrupted, resumed)
    assert resumed.logger.output_formats[0].lines.keys() | set(lines) == expected.keys()
    for step, line in resumed.logger.output_formats[0].lines.items():
        assert line == expected[step]


DROPOUT = CORES["published with dropout"]
RANDOM_TECHNIQUES = {
    type(kernel).__name__: replace(DROPOUT, kernel=kernel, position=RoPE())
    for kernel in (LSH(2, 2), Routing(2), Performer(redraw=2), RFA())
} | {"CALM": replace(DROPOUT, depth=CALM())}
AGENTS = {
    **{name: {"core": core} for name, core in CORES.items()},
    "maximum entropy": {"objective": MaximumEntropy(0.3)},
    "schedule": {"learning_rate": linear(1e-2, 1e-3), "warmup_updates": 3},
    **{name: {"core": core} for name, core in RANDOM_TECHNIQUES.items()},
    "micro-batches": {"core": DROPOUT, "gradient_accumulation_steps": 3},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(tmp_path, name):
    assert_resumes(lambda: small_agent(**AGENTS[name]), tmp_path, cut=4)


@pytest.mark.parametrize("cut", [1, LOG, STEPS - 1])
def test_a_run_can_be_resumed_after_any_update(tmp_path, cut):
    assert_resumes(lambda: small_agent(core=DROPOUT), tmp_path, cut)


def test_a_resumed_pretraining_is_bitwise_equal_to_an_uninterrupted_run(tmp_path):
    assert_resumes(
        lambda: MaskedPretraining(
            some_trajectories(), 4, core=CORES["published with dropout"], batch_size=4, seed=0, device="cpu"
        ),
        tmp_path,
        4,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 9}, "its batch_size is 8, the agent's 9"),
        ({"learning_rate": 0.5}, "its learning_rate is 0.0001, the agent's 0.5"),
        ({"core": CORES["RoPE"]}, r"its core\.\w+ is \S+, the agent's \S+; build"),
        ({"trajectories": some_trajectories(seed=1)}, "its return_scale is"),
        ({"trajectories": some_trajectories(action_space=ACTIONS["Discrete"])}, "its action_space is"),
    ],
    ids=["batch", "rate", "core", "returns", "actions"],
)
def test_a_checkpoint_with_other_settings_is_refused(tmp_path, changes, message):
    small_agent().learn(2).save(tmp_path / "cut.zip")
    other = small_agent(**changes)
    before = [weight.clone() for weight in other.policy.parameters()]
    with pytest.raises(ValueError, match=message):
        other.learn(STEPS, resume_from=tmp_path / "cut.zip")
    assert all(map(torch.equal, before, other.policy.parameters()))
    assert other.num_timesteps == 0


def test_a_finished_run_is_refused(tmp_path):
    small_agent().learn(2).save(tmp_path / "done.zip")
    with pytest.raises(ValueError, match="has reached 2 already, got steps=2; use a larger steps"):
        small_agent().learn(2, resume_from=tmp_path / "done.zip")


def test_a_file_without_generator_states_is_refused(tmp_path):
    small_agent().learn(2).save(tmp_path / "cut.zip")
    archive = read_archive(tmp_path / "cut.zip")
    del archive.tensors["generators"]
    write_archive(tmp_path / "old.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match=r"written by save\(\), not by CheckpointWriter"):
        small_agent().learn(3, resume_from=tmp_path / "old.zip")
    assert DecisionTransformer.load(tmp_path / "old.zip", device="cpu").num_timesteps == 2


def test_the_newest_checkpoint_of_a_folder_is_resumed(tmp_path):
    uninterrupted = small_agent(core=DROPOUT).learn(STEPS)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=STEPS)
    with_checkpoints = small_agent(core=DROPOUT)
    with_checkpoints.learn(STEPS, CheckpointWriter(folder, every_seconds=0))
    assert_same(uninterrupted, with_checkpoints)  # checkpoints do not affect the training
    files = folder.files()  # at least one: a checkpoint is skipped while the previous one is being written
    for file in files[max(1, len(files) - 2) :]:  # simulates an earlier interruption
        file.unlink()
    resumed = small_agent(core=DROPOUT).learn(STEPS, resume_from=folder.path)
    assert_same(uninterrupted, resumed)


def test_snapshots_are_copies(tmp_path):
    agent = small_agent()
    snapshots = []
    agent.learn(3, lambda local, _: snapshots.append(agent.snapshot()) or True)
    agent.save(tmp_path / "three.zip")
    write_archive(tmp_path / "copy.zip", snapshots[2].documents, snapshots[2].tensors)
    assert (tmp_path / "copy.zip").read_bytes() == (tmp_path / "three.zip").read_bytes()
    weights = [archive.tensors["policy"]["transformer.norm.weight"] for archive in snapshots]
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["actions", "observations", "terminated"])
def test_a_run_is_not_resumed_with_other_arrays_of_the_same_dataset(tmp_path, name):
    data = some_trajectories()
    folder = CheckpointFolder(tmp_path)
    small_agent(data).learn(STEPS, callback=CheckpointWriter(folder, every_seconds=0))
    array = getattr(data, name)
    changed = replace(data, **{name: ~array if array.dtype == bool else array[::-1]})
    with pytest.raises(ResumeError, match="its fingerprint of the data is"):
        small_agent(changed).learn(STEPS + 1, resume_from=tmp_path)


def test_a_run_is_resumed_with_another_verbosity(tmp_path):
    small_agent().learn(STEPS, callback=CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0))
    assert small_agent(verbose=1).learn(STEPS + 1, resume_from=tmp_path).num_timesteps == STEPS + 1


def test_an_agent_with_other_data_is_not_resumed_and_describes_its_data(tmp_path):
    small_agent().learn(STEPS, callback=CheckpointWriter(CheckpointFolder(tmp_path / "run"), every_seconds=0))
    small_agent().save(tmp_path / "agent.zip")
    other = replace(some_trajectories(), dataset_ids=("other/data-v0",))
    agent = DecisionTransformer.load(tmp_path / "agent.zip", other)
    with pytest.raises(ValueError, match=r"its dataset_ids is .*, the agent's \['other/data-v0'\]"):
        agent.learn(STEPS + 1, resume_from=tmp_path / "run")
    assert agent.dataset_info.dataset_ids == some_trajectories().dataset_ids
    agent.learn(1)
    agent.save(tmp_path / "trained.zip")
    assert DecisionTransformer.load(tmp_path / "trained.zip").dataset_info.dataset_ids == ("other/data-v0",)


@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: x[None], lambda x: x.long()])
def test_metrics_of_another_form_are_refused(tmp_path, change):
    agent = small_agent()
    agent.learn(2, CheckpointWriter(tmp_path, every_seconds=0), log_interval=5)
    archive = agent.snapshot()
    metrics = archive.tensors["metrics"]
    metrics["loss"] = change(metrics["loss"])
    write_archive(tmp_path / "altered.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="in metrics, 'loss' is torch"):
        small_agent().learn(4, log_interval=5, resume_from=tmp_path / "altered.zip")
