"""State of the agent between steps, and the values that callbacks see in a step."""

from dataclasses import replace

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.attention import KNN, Window
from tests.agents.gtrxl.worlds import (
    next_step_scripts,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)

ENVS = 3
CORES = {
    "XL": small_core(),
    "KNN": replace(small_core(), memory=KNN(3, 12, 4), pattern=Window(4)),
}


def most_likely(obs, index, distribution):
    return distribution.get_actions(deterministic=True)


@torch.no_grad()
def next_step(agent):
    agent.collector.start_rollout()
    return agent.collector.act(most_likely)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_restored_state_gives_same_next_step(core, recompute):
    def agent():
        return small_agent(next_step_scripts(shifted(ENVS)), core=core, recompute_memory=recompute, seed=3)

    one, other = agent(), agent()
    for _ in rollouts(one, 2):
        state = {name: tensor.clone() for name, tensor in one.collector.state_dict().items()}
    other.policy.load_state_dict(one.policy.state_dict())
    other.collector.load_state_dict(state)
    assert other.collector.state_dict().keys() == state.keys()
    ours, restored = next_step(one), next_step(other)
    assert (restored.index.position > 0).any(), "no memory would be needed"
    for name in ("obs", "previous", "hidden", "actions", "values", "log_probs"):
        assert torch.equal(getattr(ours, name), getattr(restored, name)), name


def test_incomplete_state_is_an_error():
    agent = small_agent(scripts(shifted(ENVS)))
    next(iter(rollouts(agent, 1)))
    state = agent.collector.state_dict()
    del state["memory.hidden"]
    with pytest.raises(KeyError, match=r"memory\.hidden"):
        agent.collector.load_state_dict(state)


class Watch(BaseCallback):
    """Record the values that Stable-Baselines3's algorithms show to callbacks."""

    def _on_step(self):
        names = ("infos", "rewards", "dones", "new_obs", "actions", "values", "log_probs", "rollout_buffer")
        self.seen = {name: self.locals[name] for name in names}
        assert self.locals["self"] is self.model
        return True


def test_callbacks_see_step_as_in_sb3():
    agent, watch = small_agent(scripts(shifted(ENVS))), Watch()
    agent.learn(ENVS * agent.n_steps, callback=watch)
    assert watch.seen["rollout_buffer"] is agent.rollout_buffer
    assert torch.equal(watch.seen["actions"], agent.rollout_buffer.actions[:, -1])
    assert len(watch.seen["infos"]) == len(watch.seen["rewards"]) == ENVS
