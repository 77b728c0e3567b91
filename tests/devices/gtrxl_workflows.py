"""Uses of `GTrXLPPO` on an accelerator besides plain training, for a process that has it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from torch import Tensor, nn

from rlxf import GTrXLPPO, evaluate
from rlxf.agents.common.losses import Distillation
from rlxf.agents.gtrxl import MlpGTrXLPolicy
from rlxf.agents.gtrxl.callbacks import AttentionMapCallback, HistogramCallback, MemoryCallback
from rlxf.attention import ACT, CALM, KNN, KNNLM, SPALM, DepthAdaptive, Full, StreamingXL, Window
from rlxf.collection.behavior_policy import BehaviorPolicy
from rlxf.collection.recording import rollout_episodes
from rlxf.envs import TMazeTensor, make_vec_env
from rlxf.envs.infos import LOST
from rlxf.evaluation import EvaluationCallback
from tests.agents.decision_transformer.worlds import some_trajectories
from tests.agents.gtrxl.worlds import (
    ACTIONS,
    RECURRENT_CORES,
    VECTOR,
    make_loud,
    recurrent_core,
    sampled,
    scripts,
    shifted,
    small_core,
)
from tests.devices.agents import SIZES, acted, gtrxl_agent
from tests.devices.workflows import (
    Numbers,
    Workflow,
    acting_step,
    inspected,
    keep_log,
    resumes,
    weights,
)

STEPS = 16


def agent(device: str, case: str = "default core", **settings: Any) -> GTrXLPPO:
    """Return an agent with noise on every weight, so that actions depend on observations."""
    return make_loud(gtrxl_agent(case, device, **{"learning_rate": 1e-4} | settings))


def learns(case: str = "default core", **settings: Any) -> Workflow:
    """Return a workflow that trains an agent."""
    return lambda device: weights(agent(device, case, **settings).learn(8))


def played(one: GTrXLPPO, deterministic: bool = True) -> Numbers:
    """Return the returns and lengths of some episodes, which end at different times."""
    env = scripts(shifted(3), one.observation_space, one.action_space)
    report = evaluate(one, env, 3, deterministic=deterministic)
    return report.returns, report.lengths


def rows_of(space: spaces.Space[Any], rows: int, seed: int) -> Any:
    """Return random observations of a space."""
    space.seed(seed)
    return sampled(space, rows)


def acts(case: str = "default core", **settings: Any) -> Workflow:
    """Return a workflow that evaluates an agent."""

    def workflow(device: str) -> Numbers:
        one = agent(device, case, **settings)
        observed = [rows_of(one.observation_space, 2, seed) for seed in range(3)]
        return acted(one, observed), played(one, deterministic=False)

    return workflow


def callbacks(device: str) -> Numbers:
    """Train with all callbacks that log to TensorBoard, and return the log."""
    one = agent(device)
    with TemporaryDirectory() as folder:
        rows = keep_log(one, folder)
        evaluation = EvaluationCallback(scripts(shifted(2)), 3, 8, best_path=Path(folder) / "best.zip")
        one.learn(STEPS, [MemoryCallback(1), HistogramCallback(1), AttentionMapCallback(2), evaluation])
        assert (Path(folder) / "best.zip").exists()
    assert any(name.startswith("memory/") for row in rows for name in row)
    return rows


def resumes_gtrxl(**settings: Any) -> Workflow:
    """Return a workflow that resumes a training."""

    def make(device: str) -> GTrXLPPO:
        env = VecNormalize(make_vec_env("CartPole-v1", 2, 3))
        return gtrxl_agent("default core", device, env=lambda: env, **settings)

    return resumes(make, 9, STEPS)


def continues(device: str) -> Numbers:
    """Save and load an agent, train it, set other environments, and train it."""
    with TemporaryDirectory() as folder:
        agent(device).learn(8).save(file := Path(folder) / "agent.zip")
        one = GTrXLPPO.load(file, seeded(3), device=device)
    one.learn(8, reset_num_timesteps=False)
    one.set_env(seeded(4))
    return weights(one.learn(8))


def seeded(seed: int) -> VecEnv:
    """Return environments with a seed."""
    env = scripts(shifted(2))
    env.seed(seed)
    return env


def pretrained(device: str) -> Numbers:
    """Train an agent that begins with the weights of another one."""
    return weights(gtrxl_agent("default core", device).load_pretrained(agent(device)).learn(8))


def distills(actor: str, **settings: Any) -> Workflow:
    """Return a workflow that distills a teacher into a smaller student."""

    def workflow(device: str) -> Numbers:
        student = agent(device, core=small_core(width=8, layers=1), **settings)
        teacher = agent(device, core=small_core(), **settings)
        return weights(student.distill(teacher, 8, Distillation(), actor))

    return workflow


def calibrates(**settings: Any) -> Workflow:
    """Return a workflow that calibrates early exits, and acts with them."""

    def workflow(device: str) -> Numbers:
        one = agent(device, **settings)
        found = one.calibrate(scripts(shifted(2), VECTOR, one.action_space), 0.9, 0.5, (1.0, 0.0), 2, 0)
        return found.risk, found.depth, found.threshold or 0.0, played(one)

    return workflow


def retrieves(actions: str, head: Any) -> Workflow:
    """Return a workflow that acts with a datastore, also after `save` and `load`."""

    def workflow(device: str) -> Numbers:
        one = agent(device, env=partial(choosing, actions))
        one.attach_datastore(some_trajectories(VECTOR, ACTIONS[actions]), head)
        with TemporaryDirectory() as folder:
            one.save(file := Path(folder) / "agent.zip")
            loaded = GTrXLPPO.load(file, device=device)
        observed = [rows_of(VECTOR, 2, seed) for seed in range(3)]
        return played(one, deterministic=False), [acted(each, observed) for each in (one, loaded)]

    return workflow


def inspects(device: str) -> Numbers:
    """Return attention and gates of an episode."""
    one = agent(device)
    return inspected(one, [rows_of(one.observation_space, 1, seed) for seed in range(6)])


def logits(device: str) -> Numbers:
    """Return logits of consecutive steps, whose observations are tensors on the device."""
    one, state, found = agent(device), None, []
    for step in range(4):
        observation = torch.as_tensor(rows_of(VECTOR, 2, step), device=device)
        start = np.array([step == 0, step % 2 == 0])
        x, state = one.action_logits(observation, state, start)
        state = one.observe_action(state, x.argmax(-1))
        _, state = one.predict(observation, state, start, deterministic=True)
        found.append(x)
    return found


def policy_methods(device: str) -> Numbers:
    """Return results of the policy's own methods, which are those of ``RecurrentPPO``."""
    policy, state, found = agent(device).policy, None, []
    for step in range(3):
        obs, _ = policy.obs_to_tensor(rows_of(VECTOR, 2, step))
        start = torch.tensor([step == 0, True], device=device)
        distribution, _ = policy.get_distribution(obs, state, start)
        found += [distribution.entropy(), policy.predict_values(obs, state, start)]
        actions, values, log_prob, state = policy(obs, state, start, deterministic=True)
        found += [actions, values, log_prob]
    return found


def records(device: str) -> Numbers:
    """Return episodes that are recorded for a dataset."""
    one = agent(device)
    episodes = rollout_episodes(BehaviorPolicy(one), scripts(shifted(2)), 4, deterministic=False, seed=1)
    return [(each.actions, each.rewards) for each in episodes]


def exports(**settings: Any) -> Workflow:
    """Return a workflow that exports an agent."""
    return lambda device: acting_step(agent(device, **settings).learn(8), "rlxf.agents.gtrxl.agent")


def choosing(actions: str) -> VecEnv:
    """Return environments with other actions."""
    return scripts(shifted(2), VECTOR, ACTIONS[actions])


def normalized() -> VecNormalize:
    """Return environments with normalized observations."""
    return VecNormalize(scripts(shifted(2)))


class Crashing(VecEnvWrapper):
    """Wrapper that reports steps 3 and 4 of the first environment as lost, as `WorkerVecEnv` does."""

    steps = 0

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        self.steps += 1
        if self.steps in (3, 4):
            dones[0] = self.steps == 4
            last = {"terminal_observation": obs[0], "TimeLimit.truncated": True}
            infos[0] = {"filler": True, LOST: True} | (last if dones[0] else {"filler_next": True})
        return obs, rewards, dones, infos


class PartlyOnDevice(BaseFeaturesExtractor):
    """Extractor with a layer that is on a device before the policy, and one that is not."""

    def __init__(self, observation_space: spaces.Space[Any], device: str):
        super().__init__(observation_space, features_dim=4)
        self.pretrained = nn.Linear(3, 5).to(device)
        self.layer = nn.Linear(5, 4)

    def forward(self, observations: Tensor) -> Tensor:
        return self.layer(self.pretrained(observations).tanh())


class HeadsOnDevice(MlpGTrXLPolicy):
    """Policy whose action head is on the device of the extractor before the policy."""

    def build_heads(self, log_std_init: float) -> None:
        super().build_heads(log_std_init)
        self.action_net.to(self.features_extractor_kwargs["device"])


def own_modules(device: str) -> Numbers:
    """Train an agent with modules that are on the device before the policy."""
    extractor = {
        "features_extractor_class": PartlyOnDevice,
        "features_extractor_kwargs": {"device": device},
    }
    settings = SIZES | {"core": small_core(), "learning_rate": 1e-4, "device": device}
    one = GTrXLPPO(HeadsOnDevice, scripts(shifted(2)), policy_kwargs=extractor, **settings)
    return weights(one.learn(8))


def tensors(device: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> TMazeTensor:
    """Return environments of tensors on a device."""
    return TMazeTensor(2, 3, autoreset_mode=mode, device=device)


def learns_from_tensors(mode: AutoresetMode) -> Workflow:
    """Return a workflow that trains and evaluates in environments of tensors."""

    def workflow(device: str) -> Numbers:
        one = agent(device, env=partial(tensors, device, mode)).learn(8)
        report = evaluate(one, tensors(device, mode), 2)
        return weights(one), report.returns, report.lengths

    return workflow


EARLY = replace(small_core(layers=3), depth=CALM("state", 0.5))
CLASSIFIED = replace(small_core(layers=3), depth=CALM("classifier"))
FAR = replace(small_core(), memory=KNN(4, 8, 2), pattern=Window(5))
SINKS = replace(small_core(), memory=StreamingXL(4, 2), pattern=Full())
WORKFLOWS: dict[str, Workflow] = {
    "callbacks": callbacks,
    "resume, recomputed KNN": resumes_gtrxl(core=FAR, recompute_memory=True),
    "resume, Mamba-2": resumes_gtrxl(core=RECURRENT_CORES["Mamba-2 below attention"]),
    "resume, tensors": resumes(lambda device: agent(device, env=partial(tensors, device)), 9, STEPS),
    "save, load and set_env": continues,
    "load_pretrained": pretrained,
    "distillation": distills("student"),
    "distillation, Box actions": distills("teacher", actions="Box"),
    "calibration": calibrates(core=CLASSIFIED),
    "calibration, Box actions": calibrates(core=CLASSIFIED, actions="Box"),
    "datastore": retrieves("Discrete", KNNLM(4)),
    "datastore, Box actions": retrieves("Box", SPALM(4)),
    "inspection": inspects,
    "logits": logits,
    "policy": policy_methods,
    "recording": records,
    "export": exports(),
    "export, Box actions": exports(actions="Box", core=SINKS),
    "export, GatedDeltaNet": exports(core=recurrent_core(), env=normalized),
    "crash": learns(env=lambda: Crashing(scripts(shifted(2)))),
    "tensors": learns_from_tensors(AutoresetMode.NEXT_STEP),
    "tensors, same step": learns_from_tensors(AutoresetMode.SAME_STEP),
    "evaluation": acts(),
    "evaluation, images": acts("images"),
    "evaluation, Dict observations": acts("Dict observations"),
    "evaluation, Box actions": acts("Box actions"),
    "evaluation, CALM": acts(core=EARLY),
    "evaluation, ACT": acts(core=replace(small_core(), depth=ACT())),
    "evaluation, DepthAdaptive": acts(core=replace(small_core(layers=3), depth=DepthAdaptive())),
    "state-dependent noise": learns(actions="Box", use_sde=True, sde_sample_freq=3),
    "own modules": own_modules,
    "micro-batches": learns(gradient_accumulation_steps=2, env=partial(choosing, "MultiBinary")),
    "bf16-mixed": learns(precision="bf16-mixed", learning_rate=1e-5, env=partial(choosing, "MultiDiscrete")),
    "Discrete from 2": learns(env=partial(choosing, "Discrete from 2")),
}
