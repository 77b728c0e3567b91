"""Checks of agents on an accelerator, and counts of waits, for a process that has the device."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

from rlxf import BehaviorCloning, DecisionTransformer, GTrXLPPO, ReturnConditionedMLP
from rlxf.agents.decision_transformer import ElasticHistory, HighestValueReturn, MaxReturn, SampledReturn
from rlxf.agents.gtrxl.tensor_environments import rollout_envs
from rlxf.agents.offline.objectives import MaximumEntropy, QRegularized
from rlxf.attention import CALM, KNN, RMT, Compressive, Full, GatedDeltaNet, Longformer, Window, XLRelative
from rlxf.training import NumericalError
from tests.agents.decision_transformer.worlds import TINY, some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    OBSERVATIONS,
    SMALL_EXTRACTOR,
    next_step_scripts,
    recurrent_core,
    scripts,
    shifted,
    small_core,
)
from tests.agents.mlp.worlds import environment_rows
from tests.devices import accelerator
from tests.devices.accelerator import NAME

SIZES: dict[str, Any] = {"n_steps": 4, "segment_length": 2, "batch_size": 4, "n_epochs": 1, "seed": 3}
GTRXL: dict[str, dict[str, Any]] = {
    "default core": {},
    "CALM": {"core": replace(small_core(layers=3), depth=CALM("state", 0.5))},
    "Compressive": {"core": replace(small_core(), memory=Compressive(2, 2, 2), pattern=Full())},
    "KNN": {"core": replace(small_core(), memory=KNN(4, 8, 2), pattern=Window(5))},
    "RMT": {"core": replace(small_core(), memory=RMT(4, 2), pattern=Full())},
    "GatedDeltaNet": {"core": recurrent_core(recurrence=GatedDeltaNet())},
    "Longformer": {"core": replace(small_core(), pattern=Longformer(4, farthest=8))},
    "use_sde": {"actions": "Box", "use_sde": True, "clip_range_vf": 0.2},
    "Box actions": {"actions": "Box", "reconstruction_coef": 0.1},
    "target_kl": {"target_kl": 0.1},
    "images": {"policy": "CnnGTrXLPolicy"},
    "Dict observations": {"policy": "MultiInputGTrXLPolicy"},
    "recomputed memory": {"recompute_memory": True},
    "reset steps": {"env": lambda: next_step_scripts(shifted(2))},
    "memory across episodes": {"persist_memory_across_episodes": True},
}
OFFLINE: dict[str, tuple[type, dict[str, Any]]] = {
    "target return": (DecisionTransformer, {}),
    "XLRelative": (DecisionTransformer, {"core": replace(small_core(), position=XLRelative())}),
    "context episode": (DecisionTransformer, {"core": recurrent_core(), "context": "episode"}),
    "MaxReturn": (DecisionTransformer, {"conditioning": MaxReturn()}),
    "ElasticHistory": (DecisionTransformer, {"conditioning": ElasticHistory()}),
    "HighestValueReturn": (
        DecisionTransformer,
        {"conditioning": HighestValueReturn(), "objective": QRegularized(hidden_sizes=(8,))},
    ),
    "SampledReturn": (DecisionTransformer, {"conditioning": SampledReturn()}),
    "QRegularized": (DecisionTransformer, {"objective": QRegularized(hidden_sizes=(8,))}),
    "MaximumEntropy": (DecisionTransformer, {"objective": MaximumEntropy()}),
    "auxiliary losses": (DecisionTransformer, {"state_loss_weight": 0.1, "return_loss_weight": 0.1}),
    "discrete actions": (DecisionTransformer, {"actions": spaces.Discrete(3)}),
    "weight averaging": (DecisionTransformer, {"weight_averaging": 0.9}),
    "BehaviorCloning": (BehaviorCloning, {"hidden_sizes": (8,)}),
    "ReturnConditionedMLP": (ReturnConditionedMLP, {"hidden_sizes": (8,)}),
}


def gtrxl_agent(case: str, device: str, **changes: Any) -> GTrXLPPO:
    """Return a new agent of a case of `GTRXL`."""
    settings = SIZES | {"core": small_core(), "learning_rate": 1e-3} | GTRXL[case] | changes
    policy, actions = settings.pop("policy", "MlpGTrXLPolicy"), settings.pop("actions", "Discrete")
    given = settings.pop("env", None)
    env = scripts(shifted(2), OBSERVATIONS[policy], ACTIONS[actions]) if given is None else given()
    return GTrXLPPO(policy, env, device=device, policy_kwargs=SMALL_EXTRACTOR[policy], **settings)


def offline_agent(case: str, device: str) -> Any:
    """Return a new agent of a case of `OFFLINE`."""
    agent, settings = OFFLINE[case]
    own = {"batch_size": 8, "seed": 3, "learning_rate": 1e-4} | settings
    data = some_trajectories(action_space=own.pop("actions", spaces.Box(-1.0, 2.0, (2,))))
    if agent is DecisionTransformer:
        own = {"core": TINY, "context_length": 5} | own
    return agent(data, device=device, **own)


def check_gtrxl(case: str) -> None:
    """Compare learning, acting and files with the CPU."""
    with accelerator.random_numbers_of_cpu():
        own, expected = gtrxl_agent(case, NAME).learn(16), gtrxl_agent(case, "cpu").learn(16)
    check_weights(own, expected)
    space = own.observation_space
    space.seed(0)
    observed = [space_rows(space) for _ in range(3)]
    check_files(own, lambda agent: acted(agent, observed))


def space_rows(space: spaces.Space) -> Any:
    """Return two observations of a space."""
    one, other = space.sample(), space.sample()
    if isinstance(space, spaces.Dict):
        return {key: np.stack([one[key], other[key]]) for key in one}
    return np.stack([one, other])


def acted(agent: Any, observed: list[Any]) -> list[np.ndarray]:
    """Return the actions for consecutive observations of two environments."""
    actions, state = [], None
    for number, obs in enumerate(observed):
        chosen, state = agent.predict(obs, state, np.full(2, number == 0), deterministic=True)
        actions.append(chosen)
    return actions


def check_offline(case: str) -> None:
    """Compare learning, acting and files with the CPU."""
    with accelerator.random_numbers_of_cpu():
        own, expected = offline_agent(case, NAME).learn(2), offline_agent(case, "cpu").learn(2)
    check_weights(own, expected)
    data = own.trajectories
    observed = [environment_rows(own, data, np.array([t, data.offsets[3] + t])) for t in range(3)]
    check_files(own, lambda agent: acted(agent, observed))


def check_weights(own: Any, expected: Any) -> None:
    """Assert that all weights are on the device and equal those of an agent trained on the CPU."""
    pairs = zip(own.policy.state_dict().items(), expected.policy.state_dict().values(), strict=True)
    for (name, one), other in pairs:
        assert accelerator.is_on_device(one), f"{name} is on {one.device}"
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def check_files(agent: Any, act: Callable[[Any], list[np.ndarray]]) -> None:
    """Assert that an agent acts as after `save` and `load`, on the device and on the CPU."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "agent.zip"
        agent.save(file)
        for device in (NAME, "cpu"):
            loaded = type(agent).load(file, device=device)
            assert next(loaded.policy.parameters()).device.type == device
            for one, other in zip(act(agent), act(loaded), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)


class Meter(BaseCallback):
    """Differences of a count between consecutive environment steps or updates, and between optimizer steps.

    Args:
        count: returns the count.
    """

    def __init__(self, count: Callable[[], int]):
        super().__init__()
        self.count = count
        self.steps: list[list[int]] = [[]]
        self.minibatches: list[list[int]] = [[]]

    def _on_training_start(self) -> None:
        with suppress(AttributeError):  # offline agents have no optimizer in their policy
            optimizer = self.model.policy.optimizer
            optimizer.register_step_post_hook(lambda *_: self.minibatches[-1].append(self.count()))

    def _on_rollout_start(self) -> None:
        self.steps.append([])
        self.minibatches.append([])

    def _on_step(self) -> bool:
        self.steps[-1].append(self.count())
        return True


def gtrxl_waits(case: str) -> tuple[list[int], list[int]]:
    """Return how often the program waits in each environment step, and in each minibatch but the first of an
    update. No episode is truncated.
    """
    observations = OBSERVATIONS[GTRXL[case].get("policy", "MlpGTrXLPolicy")]
    actions = ACTIONS[GTRXL[case].get("actions", "Discrete")]
    agent = gtrxl_agent(case, NAME, env=lambda: scripts([(0, 0, 1), (0, 1)], observations, actions))
    with accelerator.waits() as count:
        meter = Meter(count)
        agent.learn(24, meter)
    return differences(meter.steps), differences(meter.minibatches)


def offline_waits(case: str) -> list[int]:
    """Return how often the program waits in each update."""
    agent = offline_agent(case, NAME)
    with accelerator.waits() as count:
        meter = Meter(count)
        agent.learn(4, meter)
    return differences(meter.steps)


def differences(groups: list[list[int]]) -> list[int]:
    """Return the differences of consecutive numbers in each group."""
    return [after - before for group in groups for before, after in pairwise(group)]


def fault_in_rollout() -> str:
    """Return the error of a step whose outputs are NaN, and assert that the environments take no step."""
    agent = gtrxl_agent("default core", NAME)
    _, callback = agent._setup_learn(100)
    agent.collector.start_rollout()
    envs = rollout_envs(agent.env, agent.policy, agent.collector.env_numbers)
    agent._take_step(envs, callback)
    taken = agent.num_timesteps
    for layer in agent.collector.state.cache.layers:
        layer.values.fill_(float("nan"))
    try:
        with torch.no_grad():
            agent._take_step(envs, callback)
    except NumericalError as error:
        assert agent.num_timesteps == taken
        return str(error)
    return "no error"


def fault_in_update() -> str:
    """Return the error of an update in which a parameter becomes NaN after its check."""
    agent = gtrxl_agent("default core", NAME)
    *_, callback = agent._setup_learn(100)
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
    with torch.no_grad():
        next(agent.policy.transformer.parameters()).fill_(float("nan"))
    update = agent._algorithm.start_update(agent.objective(), 1.0, None)
    try:
        update.epoch(agent._algorithm.minibatches(agent.rollout_buffer, 2, agent.rollout_buffer.advantages))
    except NumericalError as error:
        return str(error)
    return "no error"
