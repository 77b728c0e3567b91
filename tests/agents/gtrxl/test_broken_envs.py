"""Training continues when environments raise, die or hang, and lost steps have no influence."""

import math
import os
import signal
from contextlib import closing
from functools import partial

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from rlxf.agents.gtrxl.losses import PPOLoss
from rlxf.attention.token_index import EMPTY
from rlxf.envs import BrokenEnvironmentError, Workers, WorkerVecEnv, make_vec_env
from rlxf.envs.infos import LOST
from rlxf.training import CheckpointFolder, CheckpointWriter
from rlxf.training.distributed import process_group
from tests.agents.gtrxl.test_resume import ROLLOUT, TOTAL, begin, cut_off, lines
from tests.agents.gtrxl.worlds import (
    RECURRENT_CORES,
    all_segments,
    parameters,
    rollouts,
    same,
    scripts,
    shifted,
    small_agent,
)
from tests.envs.faulty_envs import breaking, made
from tests.ranks import on_ranks

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")]

MEMORY = 8
PLAN = ("step raises", "init raises", "step dies", "reset raises", "step exits")


class Watch(BaseCallback):
    """Count lost steps and finished episodes."""

    def __init__(self):
        super().__init__()
        self.lost = self.ended = 0

    def _on_step(self):
        for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True):
            self.lost += LOST in info
            self.ended += bool(done) and LOST not in info
        return True


def test_training_continues_after_each_kind_of_crash(tmp_path):
    with closing(breaking(tmp_path, *PLAN)) as env:
        agent = begin(lambda: env)
        before, watch = parameters(agent), Watch()
        while len(list(tmp_path.iterdir())) < len(PLAN) or env.failed_envs():
            agent.learn(2 * ROLLOUT, watch, reset_num_timesteps=False)
        assert env.restarts == len(PLAN)
        assert env.lost_steps == watch.lost
        assert watch.ended == len(agent.ep_info_buffer) < 100  # a crashed episode does not count as finished
        assert all(torch.isfinite(weight).all() for weight in parameters(agent))
        assert not any(map(torch.equal, before, parameters(agent)))
        agent.learn(2 * ROLLOUT, reset_num_timesteps=False)
        line = list(lines(agent).values())[-1]
        assert (line["env/restarts"], line["env/lost_steps"]) == (str(len(PLAN)), str(env.lost_steps))


SETTINGS = {
    "episodes": {},
    "across episodes": {"persist_memory_across_episodes": True},
    "recurrence": {"core": RECURRENT_CORES["GatedDeltaNet"]},
    "recurrence across episodes": {
        "core": RECURRENT_CORES["Mamba-2 below attention"],
        "persist_memory_across_episodes": True,
    },
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def broken(request, tmp_path_factory):
    """Return an agent and a rollout in which an environment crashed and was restarted."""
    marks = tmp_path_factory.mktemp("marks")
    with closing(breaking(marks, "step dies")) as env:
        agent, before = small_agent(env, n_steps=64, **request.param), 0
        for buffer in rollouts(agent, 10**6):
            if (buffer.weight[1].diff() > 0).any():
                break
            before = env.lost_steps
        yield agent, buffer, env.lost_steps - before


def test_exactly_lost_steps_have_weight_zero(broken):
    _, buffer, number = broken
    lost = buffer.weight == 0
    assert lost.sum() == lost[1].sum() == number > 0
    assert torch.equal(lost, buffer.steps_index.episode == EMPTY)
    assert (buffer.dones | ~lost).all()


def slow_advantages(agent, buffer, env):
    """Yield the advantages of real steps in reverse; a crash truncates the episode before the lost step."""
    later, ahead = 0.0, None
    for t in reversed(range(buffer.n_steps - 1)):
        reward, value, following = buffer.rewards[env, t], buffer.values[env, t], buffer.values[env, t + 1]
        ended, broke = bool(buffer.dones[env, t]), buffer.weight[env, t + 1] == 0
        ahead = 0.0 if ended else agent.gamma * following
        later = 0.0 if ended or broke else agent.gamma * agent.gae_lambda * later
        later = reward + ahead - value + later
        if t + 1 == buffer.n_steps - 1 and not (ended or broke):
            later = buffer.advantages[env, t]  # what follows is in the next rollout
        if buffer.weight[env, t]:
            yield t, float(later)


def test_lost_step_is_bootstrapped_with_its_value(broken):
    agent, buffer, _ = broken
    for t, advantage in slow_advantages(agent, buffer, 1):
        assert math.isclose(float(buffer.advantages[1, t]), advantage, rel_tol=1e-4, abs_tol=1e-5)


def latents(agent, buffer):
    batch = all_segments(buffer)
    with torch.no_grad():
        outputs = agent.policy.exit_outputs(batch.obs, batch.previous, batch.index, batch.state).outputs[-1]
    return outputs.flatten(0, 1).unflatten(0, buffer.weight.shape)


def test_acting_equals_learning_around_a_crash(broken):
    agent, buffer, _ = broken
    batch = all_segments(buffer)
    distribution, values = agent.policy.heads(latents(agent, buffer).flatten(0, 1))
    played = batch.weight == 1
    torch.testing.assert_close(distribution.log_prob(batch.actions)[played], batch.log_probs[played])
    torch.testing.assert_close(values[played], batch.values[played], rtol=1e-4, atol=1e-5)


def test_memory_is_cleared_by_a_crash(broken):
    agent, buffer, _ = broken
    lost = (buffer.weight[1] == 0).nonzero()[:, 0]
    back = int(lost[-1]) + 1
    before = latents(agent, buffer)
    kept_obs, kept_hidden = buffer.obs.clone(), buffer.hidden.clone()
    buffer.obs[1, :back] = 3.0
    buffer.hidden[:, 1, : MEMORY + back] = 100.0
    after = latents(agent, buffer)
    buffer.obs[:], buffer.hidden[:] = kept_obs, kept_hidden
    assert back < buffer.n_steps
    assert torch.equal(before[1, back:], after[1, back:])
    assert not torch.equal(before[1, :back], after[1, :back])
    assert buffer.steps_index.position[1, back] == 0
    assert not buffer.previous[1, back].any()


def gradients(agent, batch):
    agent.policy.zero_grad()
    PPOLoss(0.2, None, 0.01, 0.5, 0.0)(agent.policy, batch)["loss"].backward()
    return [p.grad.clone() for p in agent.policy.parameters() if p.grad is not None]


def test_lost_steps_have_no_influence_on_gradients(broken):
    agent, buffer, _ = broken
    before = gradients(agent, all_segments(buffer))
    lost = buffer.weight == 0
    names = ("obs", "previous", "actions", "log_probs", "values", "advantages", "returns")
    kept = {name: getattr(buffer, name).clone() for name in names}
    for name, tensor in kept.items():
        noise = (torch.rand_like(tensor[lost].float()) * 2).to(tensor.dtype)
        getattr(buffer, name)[lost] = noise
    after = gradients(agent, all_segments(buffer))
    buffer.obs[~lost] += 0.01
    other = gradients(agent, all_segments(buffer))
    for name, tensor in kept.items():
        getattr(buffer, name)[:] = tensor
    assert same(before, after)
    assert not same(before, other)


def test_rollout_without_real_steps_changes_nothing():
    """All steps are lost if a single environment crashes at each step; statistics must stay finite."""
    agent = small_agent(scripts(shifted(3)))
    *_, buffer = rollouts(agent, 2)
    buffer.index.episode.fill_(EMPTY)
    before, deviation = parameters(agent), agent.policy.value_net.deviation
    agent.train()
    assert same(before, parameters(agent))
    assert agent.policy.value_net.deviation == deviation


def train_without_steps_of_rank_1():
    agent = small_agent(scripts(shifted(3)))
    *_, buffer = rollouts(agent, 2)
    if process_group().rank == 1:
        buffer.index.episode.fill_(EMPTY)
    agent.train()
    return [x.tolist() for x in agent.policy.parameters()]


def test_a_process_that_lost_all_steps_trains_on_those_of_the_others():
    first, second = on_ranks(2, train_without_steps_of_rank_1)
    assert first == second
    assert torch.tensor(first[0]).isfinite().all()


def test_reaching_restart_limit_ends_training(tmp_path):
    with closing(breaking(tmp_path, "step raises", *["init raises"] * 9, max_restarts=2)) as env:
        agent = small_agent(env)
        with pytest.raises(BrokenEnvironmentError, match="environment 1 raised in its constructor"):
            agent.learn(10**6)
        assert agent.num_timesteps < 10**5


@pytest.mark.thorough
def test_number_of_workers_does_not_change_bits_even_after_resuming(tmp_path):
    by_one, by_two, by_three = (partial(WorkerVecEnv, [made] * 3, Workers(number)) for number in (1, 2, 3))
    together = begin(by_one).learn(TOTAL)
    together.env.close()
    cut_off(tmp_path, by_two, 2).env.close()
    for make in (by_three, partial(DummyVecEnv, [made] * 3)):
        resumed = begin(make).learn(TOTAL, resume_from=tmp_path)
        resumed.env.close()
        assert same(parameters(together), parameters(resumed))


def test_worker_killed_between_rollouts_loses_only_its_episode(tmp_path):
    """The checkpoint is written, and a resumed run restarts only that episode."""
    with closing(breaking(tmp_path / "marks", number=3)) as env:
        agent = begin(lambda: env)
        saving = CheckpointWriter(CheckpointFolder(tmp_path / "saved"), every_seconds=1e6)
        agent.learn(2 * ROLLOUT, Killing(env, saving))
        saving._writer.wait()
    with closing(breaking(tmp_path / "marks", number=3)) as env:
        resumed, watch = begin(lambda: env), Watch()
        resumed.learn(3 * ROLLOUT, watch, resume_from=tmp_path / "saved")
        lost = resumed.rollout_buffer.weight == 0
        assert lost.nonzero().tolist() == [[1, 0], [1, 1]]
        assert (watch.lost, env.restarts, env.lost_steps) == (2, 1, 2)


class Killing(BaseCallback):
    """Kill a worker after the last rollout, before the checkpoint is written."""

    def __init__(self, env, saving):
        super().__init__()
        self.victim, self.saving = env, saving

    def _init_callback(self):
        self.saving.init_callback(self.model)

    def _on_training_start(self):
        self.saving.on_training_start(self.locals, self.globals)

    def _on_step(self):
        return self.saving.on_step()

    def _on_training_end(self):
        process = self.victim.pool._workers_by_env[1]._process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.saving.on_training_end()


def test_agent_trains_in_workers_of_make_vec_env():
    with closing(make_vec_env("CartPole-v1", 3, 5, workers=Workers(3))) as env:
        assert small_agent(env).learn(ROLLOUT).policy.value_net.variance.isfinite()
