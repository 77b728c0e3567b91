"""A run that is cut off and resumed ends with the bits of one that was not."""

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
    Checkpoints,
    linear,
    read_archive,
    write_archive,
)
from tests.agents.decision_transformer.worlds import ACTIONS, CORES, small_agent, some_trajectories

STEPS, LOG = 7, 3


class Kept(KVWriter):
    """The lines of the log, but how fast it went."""

    def __init__(self):
        self.lines = {}

    def write(self, key_values, key_excluded, step=0):
        assert step not in self.lines
        self.lines[step] = {key: value for key, value in key_values.items() if not key.startswith("time/")}

    def close(self):
        pass


class SaveAt(BaseCallback):
    """Saves after so many updates, draws from every generator, and stops if it is told to."""

    def __init__(self, step, path, stop):
        super().__init__()
        self.step, self.path, self.stop = step, path, stop

    def _on_step(self):
        if self.num_timesteps == self.step:
            self.model.save(self.path)
            return not self.stop
        return True


def logged(agent):
    kept = Kept()
    agent.set_logger(Logger(None, [kept]))
    return kept.lines


def assert_same(one, other):
    a, b = one.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (agent.optimizer.state_dict()["state"] for agent in (one, other))
    assert all(torch.equal(a[number][name], b[number][name]) for number in a for name in a[number])
    assert torch.equal(one.order.get_state(), other.order.get_state())
    assert one.num_timesteps == other.num_timesteps


def assert_resumes(fresh, tmp_path, cut):
    """Straight through, and cut off after ``cut`` updates and resumed by an agent built anew."""
    straight = fresh()
    expected = logged(straight)
    straight.learn(STEPS, log_interval=LOG)
    cut_off = fresh()
    seen = logged(cut_off)
    cut_off.learn(STEPS, SaveAt(cut, tmp_path / "cut.zip", stop=True), log_interval=LOG)
    assert cut_off.num_timesteps == cut
    torch.manual_seed(99)  # another process begins with other generators
    resumed = fresh()
    torch.manual_seed(98)
    seen |= logged(resumed)
    resumed.learn(STEPS, log_interval=LOG, resume_from=tmp_path / "cut.zip")
    assert_same(straight, resumed)
    assert resumed.logger.output_formats[0].lines.keys() | set(seen) == expected.keys()
    for step, line in resumed.logger.output_formats[0].lines.items():
        assert line == expected[step]


DROPOUT = CORES["published with dropout"]
DRAWING = {
    type(kernel).__name__: replace(DROPOUT, kernel=kernel, position=RoPE())
    for kernel in (LSH(2, 2), Routing(2), Performer(redraw=2), RFA())
} | {"CALM": replace(DROPOUT, depth=CALM())}
AGENTS = {
    **{name: {"core": core} for name, core in CORES.items()},
    "maximum entropy": {"objective": MaximumEntropy(0.3)},
    "schedule": {"learning_rate": linear(1e-2, 1e-3), "warmup_updates": 3},
    **{name: {"core": core} for name, core in DRAWING.items()},
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_that_is_cut_off_ends_with_the_same_bits(tmp_path, name):
    assert_resumes(lambda: small_agent(**AGENTS[name]), tmp_path, cut=4)


@pytest.mark.parametrize("cut", [1, LOG, STEPS - 1])
def test_wherever_it_is_cut_off(tmp_path, cut):
    assert_resumes(lambda: small_agent(core=DROPOUT), tmp_path, cut)


def test_so_does_a_pretraining(tmp_path):
    assert_resumes(
        lambda: MaskedPretraining(
            some_trajectories(), 4, core=CORES["published with dropout"], batch_size=4, seed=0, device="cpu"
        ),
        tmp_path,
        4,
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_size": 9}, "its batch_size is 8, the agent's 9"),
        ({"learning_rate": 0.5}, "its learning_rate is 0.0001, the agent's 0.5"),
        ({"core": CORES["RoPE"]}, r"its core\.\w+ is \S+, the agent's \S+; build"),
        ({"trajectories": some_trajectories(seed=1)}, "its return_scale is"),
        ({"trajectories": some_trajectories(action_space=ACTIONS["Discrete"])}, "its action_space is"),
    ],
    ids=["batch", "rate", "core", "returns", "actions"],
)
def test_another_run_is_refused_and_the_agent_stays(tmp_path, changes, told):
    small_agent().learn(2).save(tmp_path / "cut.zip")
    other = small_agent(**changes)
    before = [weight.clone() for weight in other.policy.parameters()]
    with pytest.raises(ValueError, match=told):
        other.learn(STEPS, resume_from=tmp_path / "cut.zip")
    assert all(map(torch.equal, before, other.policy.parameters()))
    assert other.num_timesteps == 0


def test_a_run_that_is_done_is_refused(tmp_path):
    small_agent().learn(2).save(tmp_path / "done.zip")
    with pytest.raises(ValueError, match="has 2 of them already, got steps=2; ask for more"):
        small_agent().learn(2, resume_from=tmp_path / "done.zip")


def test_a_file_without_generators_is_refused(tmp_path):
    small_agent().learn(2).save(tmp_path / "cut.zip")
    archive = read_archive(tmp_path / "cut.zip")
    del archive.tensors["generators"]
    write_archive(tmp_path / "old.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match=r"written by save\(\), not by Checkpoints"):
        small_agent().learn(3, resume_from=tmp_path / "old.zip")
    assert DecisionTransformer.load(tmp_path / "old.zip", device="cpu").num_timesteps == 2


def test_the_newest_of_a_folder_is_resumed(tmp_path):
    straight = small_agent(core=DROPOUT).learn(STEPS)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=STEPS)
    watched = small_agent(core=DROPOUT)
    watched.learn(STEPS, Checkpoints(folder, every_seconds=0))
    assert_same(straight, watched)  # who is looked at learns the same
    for file in folder.files()[-2:]:  # as if it had been killed earlier
        file.unlink()
    resumed = small_agent(core=DROPOUT).learn(STEPS, resume_from=folder.path)
    assert_same(straight, resumed)


def test_a_copy_is_not_changed_by_what_comes_later(tmp_path):
    agent = small_agent()
    kept = []
    agent.learn(3, lambda local, _: kept.append(agent.snapshot()) or True)
    agent.save(tmp_path / "three.zip")
    write_archive(tmp_path / "copy.zip", kept[2].documents, kept[2].tensors)
    assert (tmp_path / "copy.zip").read_bytes() == (tmp_path / "three.zip").read_bytes()
    weights = [archive.tensors["policy"]["transformer.norm.weight"] for archive in kept]
    assert not torch.equal(weights[0], weights[2])
