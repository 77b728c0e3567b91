"""A resumed run is bit-identical to an uninterrupted run, with any number of processes."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from rlxf.agents.gtrxl.resume import gather_state, shard_state
from rlxf.attention import (
    KNN,
    LSH,
    RMT,
    Compressive,
    Full,
    GRUGate,
    Performer,
    RoPE,
    Routing,
    StreamingXL,
    Window,
)
from rlxf.envs import make_vec_env
from rlxf.envs.action_replay import ActionReplay
from rlxf.evaluation.periodic import PeriodicCallback
from rlxf.training import (
    Archive,
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    ResumeError,
    read_archive,
    write_archive,
)
from rlxf.training.checkpoints import BackgroundWriter
from rlxf.training.process_group import ProcessGroup
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    DICT,
    IMAGE,
    RECURRENT_CORES,
    VECTOR,
    Scripted,
    next_step_scripts,
    parameters,
    same,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ENVS, ROLLOUT = 3, 3 * 16
TOTAL = 5 * ROLLOUT


@pytest.fixture(autouse=True)
def _every_checkpoint(monkeypatch):
    """Wait for the previous checkpoint instead of skipping one, as needed on a slow disk."""
    monkeypatch.setattr(BackgroundWriter, "busy", False)


class Lively(Scripted):
    """Environment with random terminations and truncations, determined by its seed."""

    def reset(self, *, seed=None, options=None):
        self.life = 0
        self.ends = np.random.default_rng(seed).choice(3, size=40, p=[0.8, 0.1, 0.1])
        return super().reset(seed=seed)


class Counting(Scripted):
    """Environment whose first observation is the number of episodes so far, which no seed determines."""

    def reset(self, *, seed=None, options=None):
        self.count = getattr(self, "count", 0) + 1
        observation, info = super().reset(seed=seed)
        return np.full_like(observation, 1 / self.count), info


def lively(observation_space=VECTOR, action_space=ACTIONS["Discrete"], kind=DummyVecEnv):
    def make():
        return ActionReplay(Monitor(Lively((), *copy.deepcopy((observation_space, action_space)))))

    return kind([make] * ENVS)


class Rollouts(BaseCallback):
    """Stop the training after a number of rollouts, at the first step of the next one."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def _on_rollout_end(self):
        self.left -= 1

    def _on_step(self):
        return self.left > 0


class Kept(KVWriter):
    """Return the lines of the log without speeds."""

    def __init__(self):
        self.lines = {}

    def write(self, key_values, key_excluded, step=0):
        fast = ("time/fps", "time/time_elapsed")
        self.lines[step] = {
            key: f"{value:.6g}"  # means of VecMonitor's returns are float32 in one of the runs
            for key, value in key_values.items()
            if isinstance(value, int | float | np.number) and key not in fast
        }

    def close(self):
        pass


def with_log(agent):
    agent.set_logger(Logger(None, [Kept()]))
    return agent


def lines(agent):
    return agent.logger.output_formats[0].lines


def begin(make, **settings):
    return with_log(small_agent(make(), learning_rate=1e-3, **{"n_epochs": 1} | settings))


def cut_off(folder, make, rollouts, **settings):
    """Return the agent after a crash after ``rollouts`` rollouts; checkpoints are in the folder."""
    saving = CheckpointWriter(CheckpointFolder(folder), every_seconds=0)
    agent = begin(make, **settings)
    agent.learn(TOTAL, [saving, Rollouts(rollouts)], log_interval=2)
    saving._writer.wait()
    return agent


def assert_resumes(folder, make, rollouts=2, **settings):
    straight = begin(make, **settings)
    straight.learn(TOTAL, log_interval=2)
    seen = lines(cut_off(folder, make, rollouts, **settings))
    torch.manual_seed(99)  # another process begins with other generators
    resumed = begin(make, **settings)
    resumed.env.seed(77)
    resumed.learn(TOTAL, log_interval=2, resume_from=folder)
    assert resumed.num_timesteps == straight.num_timesteps == TOTAL
    assert same(parameters(straight), parameters(resumed))
    assert torch.equal(straight.policy.value_net.variance, resumed.policy.value_net.variance)
    assert torch.equal(straight.order.get_state(), resumed.order.get_state())
    remaining = {step: line for step, line in lines(straight).items() if step > rollouts * ROLLOUT}
    assert lines(resumed) == remaining
    assert seen.keys() | remaining.keys() == lines(straight).keys()
    for one, other in zip(straight.ep_info_buffer, resumed.ep_info_buffer, strict=True):
        assert (one["r"], one["l"]) == (other["r"], other["l"])


WORLDS = {
    "T-Maze, a vector environment that gives its state": lambda: make_vec_env("rlxf/TMaze-v0", ENVS, 3),
    "episodes that are played again": lively,
    "Dict observations": lambda: lively(DICT),
    "Box actions": lambda: lively(action_space=ACTIONS["Box"]),
    "state-dependent noise": lambda: lively(action_space=ACTIONS["Box"]),
    "MultiBinary actions": lambda: lively(action_space=ACTIONS["MultiBinary"]),
    "an id": lambda: make_vec_env("CartPole-v1", ENVS, 3),
    "across episodes": lambda: make_vec_env("CartPole-v1", ENVS, 3, previous_transition=True),
    "VecNormalize": lambda: VecNormalize(make_vec_env("CartPole-v1", ENVS, 3)),
    "VecMonitor and VecFrameStack": lambda: VecFrameStack(VecMonitor(lively()), 2),
    "images": lambda: VecTransposeImage(lively(IMAGE)),
}
POLICIES = {
    "state-dependent noise": {"use_sde": True, "sde_sample_freq": 5},
    "Dict observations": {"policy": "MultiInputGTrXLPolicy"},
    "across episodes": {"policy": "MultiInputGTrXLPolicy", "persist_memory_across_episodes": True},
    "images": {"policy": "CnnGTrXLPolicy"},
}


@pytest.mark.parametrize("world", WORLDS)
def test_resumed_run_ends_with_same_bits(tmp_path, world):
    assert_resumes(tmp_path, WORLDS[world], **POLICIES.get(world, {}))


FAR = replace(small_core(), memory=KNN(8, far=24, top=4), pattern=Window(9))
AGENTS = {
    "refresh of KNN": {
        "recompute_memory": True,
        "core": FAR,
    },
    "recurrence across episodes": {
        "core": RECURRENT_CORES["attention below GRU"],
        "persist_memory_across_episodes": True,
    },
    "early end, Routing": {
        "target_kl": 1e-4,
        "core": replace(small_core(), kernel=Routing(2, decay=0.5), position=RoPE()),
    },
    "micro-batches and bf16": {"gradient_accumulation_steps": 2, "precision": "bf16-mixed"},
    "Compressive": {"core": replace(small_core(), memory=Compressive(4, 4, 2), pattern=Full())},
    "LSH": {"core": replace(small_core(), kernel=LSH(2, 2), position=RoPE())},
    "recompute_memory": {"recompute_memory": True},
    "KNN": {"core": FAR},
    "StreamingXL": {"core": replace(small_core(), memory=StreamingXL(4, 2), pattern=Full())},
    "RMT": {"core": replace(small_core(), memory=RMT(6, 2), pattern=Full())},
    "Performer": {"core": replace(small_core(), kernel=Performer(), position=RoPE())},
    "Routing": {"core": replace(small_core(), kernel=Routing(2), position=RoPE())},
    "reconstruction": {"reconstruction_coef": 0.1},
    "recurrence": {"core": RECURRENT_CORES["GatedDeltaNet"]},
    "recurrence with a state named hidden": {"core": RECURRENT_CORES["LSTM"]},
    "recurrence below attention": {"core": RECURRENT_CORES["Mamba-2 below attention"]},
    "previous actions unseen": {"previous_action": False},
    "early end of updates": {"target_kl": 1e-4},
}


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("name", AGENTS)
def test_resumption_is_exact_for_every_memory(tmp_path, name):
    assert_resumes(tmp_path, lively, **AGENTS[name])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("rollouts", [1, 3, 4])
def test_resumption_is_exact_at_every_rollout(tmp_path, rollouts):
    assert_resumes(tmp_path, lively, rollouts)


@pytest.mark.parametrize(("stored", "here"), [(None, 32), (32, None), (None, None)])
def test_the_default_size_of_rollouts_can_be_resumed(tmp_path, monkeypatch, stored, here):
    """Earlier files have the number in place of the default."""
    monkeypatch.setattr("rlxf.agents.gtrxl.config.ROLLOUT_STEPS", 32 * ENVS)
    begin(lively, n_steps=stored).learn(32 * ENVS, CheckpointWriter(tmp_path))
    resumed = begin(lively, n_steps=here).learn(64 * ENVS, resume_from=tmp_path)
    assert (resumed.n_steps, resumed.num_timesteps) == (32, 64 * ENVS)
    with pytest.raises(ResumeError, match="its n_steps is 32, the agent's 16"):
        begin(lively, n_steps=16).learn(TOTAL, resume_from=tmp_path)


class Scaled(FlattenExtractor):
    """Extractor with a function as argument."""

    def __init__(self, observation_space, scale):
        super().__init__(observation_space)
        self.scale = scale

    def forward(self, observations):
        return self.scale(super().forward(observations))


def test_arguments_that_are_functions_can_be_resumed(tmp_path):
    """Each process has its own function objects."""

    def kwargs(bias=0.0):
        scale = (lambda x: 2 * x) if not bias else partial(torch.add, other=bias)
        return {"features_extractor_class": Scaled, "features_extractor_kwargs": {"scale": scale}}

    begin(lively, policy_kwargs=kwargs()).learn(ROLLOUT, CheckpointWriter(tmp_path))
    resumed = begin(lively, policy_kwargs=kwargs()).learn(2 * ROLLOUT, resume_from=tmp_path)
    assert resumed.num_timesteps == 2 * ROLLOUT
    with pytest.raises(
        ResumeError, match=r"scale\.lost is <function .*<lambda>>, the agent's functools.partial"
    ):
        begin(lively, policy_kwargs=kwargs(1.0)).learn(TOTAL, resume_from=tmp_path)


class Returns(PeriodicCallback):
    """Callback with a state: the sums of the rewards of its intervals."""

    def __init__(self):
        super().__init__(every_steps=ROLLOUT)
        self.sums = [0.0]

    def _on_step(self):
        self.sums[-1] += float(self.locals["rewards"].sum())
        return super()._on_step()

    def on_interval(self):
        self.sums.append(0.0)
        return 1

    def expected_steps(self):
        return 1.0

    def state(self):
        return super().state() | {"sums": self.sums}

    def load_state(self, state):
        super().load_state(state)
        self.sums = state["sums"]


def test_the_states_of_callbacks_are_resumed(tmp_path):
    straight = Returns()
    begin(lively).learn(TOTAL, straight)
    saving = CheckpointWriter(tmp_path, every_seconds=0)
    begin(lively).learn(TOTAL, CallbackList([Rollouts(2), CallbackList([Returns(), Returns()]), saving]))
    resumed = Returns(), Returns(), Returns()  # the file has no state of the third
    begin(lively).learn(TOTAL, list(resumed), resume_from=tmp_path)
    assert resumed[0].sums == resumed[1].sums == straight.sums
    assert resumed[0].played == straight.played == TOTAL // ROLLOUT
    assert len(resumed[2].sums) < len(straight.sums)


def test_invalid_states_of_callbacks_are_rejected(tmp_path):
    begin(lively).learn(ROLLOUT, [Returns(), CheckpointWriter(tmp_path)])
    file = CheckpointFolder(tmp_path).newest()
    archive = read_archive(file)
    archive.documents["callbacks"]["Returns"] = {"sums": []}
    write_archive(file, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="played"):
        begin(lively).learn(TOTAL, Returns(), resume_from=file)


@pytest.mark.thorough
def test_resumption_with_worker_processes(tmp_path):
    # The other start methods import torch in each process.
    subprocesses = partial(SubprocVecEnv, start_method="fork")
    together = begin(lively).learn(TOTAL)
    cut_off(tmp_path, lambda: lively(kind=subprocesses), 2).env.close()
    resumed = begin(lambda: lively(kind=subprocesses)).learn(TOTAL, resume_from=tmp_path)
    resumed.env.close()
    assert same(parameters(together), parameters(resumed))


@pytest.mark.thorough
def test_finished_training_can_be_extended(tmp_path):
    """A checkpoint at the end of `learn` takes the memory from the last rollout."""
    constant = {"learning_rate": 1e-3, "ent_coef": 0.01, "recompute_memory": True}
    straight = small_agent(lively(), **constant).learn(TOTAL)
    small_agent(lively(), **constant).learn(2 * ROLLOUT, CheckpointWriter(CheckpointFolder(tmp_path), 1e6))
    resumed = small_agent(lively(), **constant).learn(TOTAL, resume_from=tmp_path)
    assert same(parameters(straight), parameters(resumed))


LOST = {
    "not replayable": (lambda: scripts(shifted(ENVS)), "are not wrapped in rlxf.envs.ActionReplay"),
    "reset steps": (lambda: next_step_scripts(shifted(ENVS)), "is not a rlxf.envs.StatefulVectorEnv"),
    "kept over resets": (
        lambda: DummyVecEnv([lambda: ActionReplay(Counting())] * ENVS),
        "results in a different episode",
    ),
}


@pytest.mark.parametrize(("make", "message"), LOST.values(), ids=LOST)
def test_episodes_that_cannot_resume_restart_with_warning(tmp_path, make, message):
    cut_off(tmp_path, make, 2)
    resumed = begin(make)
    with pytest.warns(UserWarning, match=f"new episodes.*{message}"):
        resumed.learn(TOTAL, resume_from=tmp_path)
    assert resumed.num_timesteps == TOTAL
    assert all(torch.isfinite(weight).all() for weight in parameters(resumed))


def test_environment_that_raises_during_replay_restarts(tmp_path, monkeypatch):
    cut_off(tmp_path, lively, 2)
    resumed = begin(lively)
    steps = iter([RuntimeError("the simulator is gone")])

    def failing(self, action, step=Lively.step):
        for error in steps:
            raise error
        return step(self, action)

    monkeypatch.setattr(Lively, "step", failing)
    with pytest.warns(UserWarning, match="the simulator is gone"):
        resumed.learn(TOTAL, resume_from=tmp_path)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (lively, {"batch_size": 32}, "its batch_size is 16, the agent's 32"),
        (lively, {"core": replace(small_core(), layers=1)}, r"its core\.layers is 2, the agent's 1;"),
        (
            lively,
            {"core": small_core(residual=GRUGate(bias=3))},
            r"its core\.residual\.bias is 2\.0, the agent's 3;",
        ),
        (lambda: lively(action_space=ACTIONS["Box"]), {}, "its action_space is"),
        (lambda: VecNormalize(lively()), {}, "wrappers have state"),
    ],
    ids=["batch", "core", "option", "actions", "wrappers"],
)
def test_run_with_other_settings_is_rejected(tmp_path, make, changes, message):
    cut_off(tmp_path, lively, 1)
    with pytest.raises(ValueError, match=message):
        begin(make, **changes).learn(TOTAL, resume_from=tmp_path)


def test_file_of_save_cannot_be_resumed(tmp_path):
    begin(lively).learn(ROLLOUT).save(tmp_path / "saved.zip")
    with pytest.raises(CheckpointError, match="cannot be resumed exactly"):
        begin(lively).learn(TOTAL, resume_from=tmp_path / "saved.zip")


def test_finished_run_is_rejected(tmp_path):
    cut_off(tmp_path, lively, 2)
    with pytest.raises(ValueError, match="use a larger total_timesteps"):
        begin(lively).learn(ROLLOUT, resume_from=tmp_path)


def test_checkpoint_can_be_loaded(tmp_path):
    from rlxf import GTrXLPPO

    cut_off(tmp_path, lively, 2)
    file = CheckpointFolder(tmp_path).newest()
    agent = GTrXLPPO.load(file, env=lively(), device="cpu")
    assert agent.num_timesteps == 2 * ROLLOUT
    archive = read_archive(file)
    del archive.tensors["rollout_state"]["position"]
    write_archive(file, archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="position"):
        begin(lively).learn(TOTAL, resume_from=file)


@pytest.mark.parametrize("pending", [[1, "2", []], [[1], 2, []], [None, 2, []], [1.5, 2, []]])
def test_pending_log_values_that_are_no_numbers_are_refused(tmp_path, pending):
    cut_off(tmp_path, lively, 1)
    archive = read_archive(CheckpointFolder(tmp_path).newest())
    archive.documents["run"]["log"]["train/loss"] = pending
    write_archive(tmp_path / "altered.zip", archive.documents, archive.tensors)
    with pytest.raises(CheckpointError, match="cannot build its agent: TypeError"):
        begin(lively).learn(TOTAL, resume_from=tmp_path / "altered.zip")


ENVS_PER_RANK = 2


class FixedGroup(ProcessGroup):
    """Process of a group whose gathered archives are a given list."""

    def __init__(self, rank, archives):
        self.rank, self.world_size, self.archives = rank, len(archives), archives

    def gather_archives(self, own):
        return copy.deepcopy(self.archives)


def state_of(rank):
    """Document of environments that return their state; the clock is shared by all of them."""
    env = {"clock": 7, "cells": [10 * rank, 10 * rank + 1], "rows": {"goals": [[rank], [rank + 5]]}}
    return {"state": {"env": env, "filler": [False, rank == 1]}}, {}


def records_of(rank):
    """Document of environments that are replayed; a crashed environment shows its last observation."""
    own = {"restarts": {"seed": rank, "restarts": 2 * rank, "lost_steps": 4 - rank}}
    records = [{"seed": rank, "number": 3} | own, ({"absent": True} if rank else {"seed": 9}) | own]
    last = {"shown.1.": torch.full((1, 2), rank), "shown.1.a.2": torch.arange(rank)}
    other = last if rank else {"actions.1": torch.arange(5)}
    return {"records": records}, {"actions.0": torch.arange(rank + 1)} | other


def rank_archive(rank, episodes):
    document, actions = episodes(rank)
    rollout_state = {
        "position": torch.tensor([rank, rank]),
        "memory.hidden": torch.full((3, ENVS_PER_RANK, 4), float(rank)),
    }
    wrappers = {"0.VecNormalize.0.returns": torch.tensor([rank, 0.5]), "0.VecNormalize.1.mean": torch.ones(5)}
    return Archive(
        {"environment": document}, {"rollout_state": rollout_state, "wrappers": wrappers, "episodes": actions}
    )


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for group in one:
        assert one[group].keys() == other[group].keys(), group
        assert all(torch.equal(one[group][name], other[group][name]) for name in one[group]), group


@pytest.mark.parametrize("episodes", [state_of, records_of])
def test_sharding_inverts_gathering(episodes):
    parts = [rank_archive(rank, episodes) for rank in range(3)]
    own = copy.deepcopy(parts[0])
    whole = gather_state(FixedGroup(0, parts), own.documents["environment"], own.tensors)
    for rank, part in enumerate(parts):
        environment, groups = shard_state(FixedGroup(rank, parts), ENVS_PER_RANK, *copy.deepcopy(whole))
        assert_equal(groups, part.tensors)
        assert environment == part.documents["environment"]


def test_single_process_is_unchanged():
    own = rank_archive(0, records_of)
    document, groups = gather_state(ProcessGroup(), own.documents["environment"], own.tensors)
    assert document == own.documents["environment"]
    assert_equal(groups, own.tensors)
    assert_equal(shard_state(ProcessGroup(), ENVS_PER_RANK, document, groups)[1], own.tensors)


def test_incompatible_states_are_lost():
    parts = [rank_archive(rank, state_of) for rank in range(2)]
    parts[1].documents["environment"]["state"]["env"]["clock"] = 8
    own = copy.deepcopy(parts[0])
    document, _ = gather_state(FixedGroup(0, parts), own.documents["environment"], own.tensors)
    assert "of several processes" in document["lost"]


def test_unsigned_integers_can_be_saved(tmp_path):
    space = spaces.Box(0, 60_000, (3,), np.uint16)
    env = scripts(shifted(ENVS), space, spaces.MultiDiscrete(np.array([2, 3]), dtype=np.uint16))
    small_agent(env).learn(ROLLOUT, CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0))
    groups = read_archive(CheckpointFolder(tmp_path).newest()).tensors.values()
    assert torch.uint16 in {x.dtype for group in groups for x in group.values()}
