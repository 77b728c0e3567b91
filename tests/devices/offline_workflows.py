"""Uses of agents that learn offline on an accelerator besides plain training, for a process that has it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gymnasium import spaces

from rlxf import DecisionTransformer, estimate_return, evaluate
from rlxf.agents.common.losses import Distillation
from rlxf.agents.decision_transformer import ElasticHistory, HighestValueReturn, MaxReturn
from rlxf.agents.decision_transformer.callbacks import ContextAttentionCallback
from rlxf.agents.offline.objectives import MaximumEntropy, QRegularized
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.agents.token_masking import KINDS
from rlxf.attention import ACT, CALM, KNNLM, SPALM, TransformerSpec
from rlxf.data import Trajectories
from rlxf.evaluation import BestValidationCallback, EvaluationCallback
from rlxf.off_policy_evaluation.behavior import estimate_behavior
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    IMAGE,
    NESTED,
    SIZES,
    TINY,
    VECTOR,
    make_loud,
    some_trajectories,
)
from tests.agents.gtrxl.worlds import recurrent_core, scripts, shifted, small_core
from tests.agents.mlp.worlds import LENGTHS, environment_rows
from tests.devices.agents import OFFLINE, acted
from tests.devices.workflows import (
    Numbers,
    Workflow,
    acting_step,
    inspected,
    keep_log,
    resumes,
    weights,
)

SCALED = spaces.Box(-1.0, 2.0, (2,), np.float32)
HIGHEST_VALUE = {"conditioning": HighestValueReturn(), "objective": QRegularized(hidden_sizes=(8,))}
EARLY = TransformerSpec(**(SIZES | {"layers": 3}), depth=CALM("state", 0.5))
CONDITIONS: dict[str, dict[str, Any]] = {
    "target return": {},
    "MaxReturn": {"conditioning": MaxReturn()},
    "ElasticHistory": {"conditioning": ElasticHistory()},
    "HighestValueReturn": HIGHEST_VALUE,
    "episode": {"core": recurrent_core(), "context": "episode"},
    "episode, GTrXL": {"core": small_core(), "context": "episode"},
    "CALM": {"core": EARLY},
    "ACT": {"core": replace(EARLY, depth=ACT())},
}


def agent(device: str, data: Trajectories | None = None, kind: Any = DecisionTransformer, **own: Any) -> Any:
    """Return an agent with noise on every weight, so that actions depend on observations."""
    data = some_trajectories(VECTOR, SCALED) if data is None else data
    settings = {"batch_size": 8, "seed": 3, "device": device, "learning_rate": 1e-4}
    if kind in (DecisionTransformer, MaskedPretraining):
        settings |= {"core": TINY, "context_length": 5}
    return make_loud(kind(data, **(settings | own)))


def mlp(name: str) -> Callable[..., Any]:
    """Return `agent` for a multilayer perceptron."""
    return lambda device, **own: agent(
        device, some_trajectories(VECTOR, SCALED, LENGTHS), OFFLINE[name][0], hidden_sizes=(8,), **own
    )


def choosing(device: str, **own: Any) -> Any:
    """Return an agent with discrete actions."""
    return agent(device, some_trajectories(VECTOR, ACTIONS["Discrete"]), **own)


def played(one: Any, deterministic: bool = True) -> Numbers:
    """Return the returns of some episodes, which end at different times."""
    env = scripts(shifted(3), one.trajectories.observation_space, one.action_space)
    targets = {"target_returns": [2.0]} if one.return_conditioned else {}
    result = evaluate(one, env, 3, deterministic=deterministic, **targets)
    return [each.returns for each in (result.reports.values() if targets else [result])]


def replayed(one: Any) -> Numbers:
    """Return the actions on steps of the dataset."""
    data = one.trajectories
    return acted(one, [environment_rows(one, data, np.array([t, data.offsets[3] + t])) for t in range(4)])


def acts(make: Callable[..., Any] = agent, **own: Any) -> Workflow:
    """Return a workflow that evaluates an agent."""

    def workflow(device: str) -> Numbers:
        one = make(device, **own)
        return replayed(one), played(one, deterministic=False)

    return workflow


def acts_on(observations: spaces.Space[Any], **own: Any) -> Workflow:
    """Return a workflow that learns from observations of a space, and acts on them."""

    def workflow(device: str) -> Numbers:
        one = agent(device, some_trajectories(observations, SCALED), **own).learn(2)
        return weights(one), replayed(one)

    return workflow


def callbacks(device: str) -> Numbers:
    """Train with validation, weight averaging, evaluation and a plot of attention; return the log."""
    one = agent(device, validation_fraction=0.3, weight_averaging=0.9)
    with TemporaryDirectory() as folder:
        rows, file = keep_log(one, folder), Path(folder) / "best.zip"
        env = scripts(shifted(2), VECTOR, SCALED)
        evaluation = EvaluationCallback(env, 3, 2, target_returns=[3.0])
        plots = [ContextAttentionCallback(4), BestValidationCallback(2, file), evaluation]
        one.learn(4, plots, log_interval=2)
        loaded = DecisionTransformer.load(file, one.trajectories, device=device)
    return rows, weights(one), replayed(loaded)


def validates(make: Callable[..., Any]) -> Workflow:
    """Return a workflow that measures the losses on held-out episodes."""
    return lambda device: make(device, validation_fraction=0.3).validation_losses()


def resumes_offline(make: Callable[..., Any] = agent, **own: Any) -> Workflow:
    """Return a workflow that resumes a training."""
    return resumes(lambda device: make(device, **own), 1, 2)


def learns_online(target: float | None = 3.0, **own: Any) -> Workflow:
    """Return a workflow that trains an agent in environments."""

    def workflow(device: str) -> Numbers:
        env = scripts(shifted(2), VECTOR, SCALED)
        env.seed(3)
        one = agent(device, **own).learn_online(16, target, env, round_steps=8, round_updates=1)
        return weights(one)

    return workflow


def pretrains(device: str) -> Numbers:
    """Pre-train a transformer, and load it into an agent, which is trained."""
    source = agent(device, kind=MaskedPretraining, predicted_tokens=KINDS, validation_fraction=0.3).learn(2)
    with TemporaryDirectory() as folder:
        source.save(file := Path(folder) / "pretrained.zip")
        source = MaskedPretraining.load(file, source.trajectories, device=device)
    one = agent(device).load_pretrained(source).learn(2)
    return source.validation_losses(), weights(source), weights(one)


def distills(make: Callable[..., Any], **own: Any) -> Workflow:
    """Return a workflow that distills a teacher into a smaller student."""

    def workflow(device: str) -> Numbers:
        student = make(device, core=replace(TINY, width=8, layers=1), **own)
        return weights(student.distill(make(device, **own), 2, Distillation()))

    return workflow


def calibrates(make: Callable[..., Any]) -> Workflow:
    """Return a workflow that calibrates early exits, and acts with them."""

    def workflow(device: str) -> Numbers:
        one = make(device, core=EARLY)
        found = one.calibrate(0.9, 0.5, (1.0, 0.5, 0.0), steps=8)
        return found.risk, found.depth, found.threshold or 0.0, replayed(one)

    return workflow


def retrieves(make: Callable[..., Any], head: Any, **own: Any) -> Workflow:
    """Return a workflow that acts with a datastore, also after `save` and `load`."""

    def workflow(device: str) -> Numbers:
        one = make(device, **own)
        one.attach_datastore(one.trajectories, head)
        with TemporaryDirectory() as folder:
            one.save(file := Path(folder) / "agent.zip")
            loaded = DecisionTransformer.load(file, one.trajectories, device=device)
        return [replayed(each) for each in (one, loaded)]

    return workflow


def inspects(**own: Any) -> Workflow:
    """Return a workflow with attention and gates of an episode."""

    def workflow(device: str) -> Numbers:
        one = agent(device, **own)
        observed = [environment_rows(one, one.trajectories, np.array([t])) for t in range(6)]
        return inspected(one, observed)

    return workflow


def exports(**own: Any) -> Workflow:
    """Return a workflow that exports an agent."""
    return lambda device: acting_step(
        agent(device, **own).learn(2), "rlxf.agents.decision_transformer.acting"
    )


def estimates(make: Callable[..., Any] = agent, **own: Any) -> Workflow:
    """Return a workflow that estimates the return of an agent by fitted Q evaluation."""

    def workflow(device: str) -> Numbers:
        one = make(device, **own)
        target = {"target_return": 2.0} if one.return_conditioned else {}
        settings = {"updates": 4, "members": 2, "device": device} | target
        result = estimate_return(one, one.trajectories, **settings)
        return result.value, result.ci

    return workflow


def estimates_doubly_robust(device: str) -> Numbers:
    """Estimate the return of a stochastic policy, with estimated probabilities of the logged actions."""
    one = choosing(device)
    logged = estimate_behavior(one.trajectories, 0, device, updates=4)
    settings: dict[str, Any] = {"updates": 4, "members": 2, "device": device, "target_return": 2.0}
    result = estimate_return(
        one, one.trajectories, "wdr", behavior_probabilities=logged, deterministic=False, **settings
    )
    return logged, result.value, result.ci


WORKFLOWS: dict[str, Workflow] = {
    **{f"evaluation, {name}": acts(**own) for name, own in CONDITIONS.items()},
    **{f"evaluation, {name}": acts(mlp(name)) for name in ("BehaviorCloning", "ReturnConditionedMLP")},
    "evaluation, discrete actions": acts(choosing),
    "evaluation, MaximumEntropy": acts(objective=MaximumEntropy()),
    "evaluation, GTrXL": acts(core=CORES["GTrXL"]),
    "images": acts_on(IMAGE),
    "nested observations": acts_on(NESTED),
    "images, episode": acts_on(IMAGE, core=small_core(), context="episode"),
    "micro-batches": acts_on(VECTOR, gradient_accumulation_steps=2),
    "bf16-mixed": acts_on(VECTOR, precision="bf16-mixed", learning_rate=1e-5),
    "callbacks": callbacks,
    **{
        f"validation, {name}": validates(lambda device, o=own, **v: agent(device, **o, **v))
        for name, own in CONDITIONS.items()
    },
    "validation, BehaviorCloning": validates(mlp("BehaviorCloning")),
    "resume": resumes_offline(weight_averaging=0.9),
    "resume, HighestValueReturn": resumes_offline(**HIGHEST_VALUE),
    "resume, BehaviorCloning": resumes_offline(mlp("BehaviorCloning"), weight_averaging=0.9),
    "online": learns_online(objective=MaximumEntropy()),
    "online, MaxReturn": learns_online(None, conditioning=MaxReturn(), objective=MaximumEntropy()),
    "online, HighestValueReturn": learns_online(None, **HIGHEST_VALUE),
    "pre-training": pretrains,
    "distillation": distills(agent),
    "distillation, discrete actions": distills(choosing),
    "distillation, MaximumEntropy": distills(agent, objective=MaximumEntropy()),
    "calibration": calibrates(agent),
    "calibration, discrete actions": calibrates(choosing),
    "datastore": retrieves(agent, SPALM(4)),
    "datastore, discrete actions": retrieves(choosing, KNNLM(4)),
    "datastore, episode": retrieves(agent, KNNLM(4), core=small_core(), context="episode"),
    "inspection": inspects(),
    "inspection, MaxReturn": inspects(conditioning=MaxReturn()),
    "inspection, ElasticHistory": inspects(conditioning=ElasticHistory()),
    "inspection, episode": inspects(core=small_core(), context="episode"),
    "export": exports(),
    "export, MaxReturn": exports(conditioning=MaxReturn()),
    "export, MaximumEntropy": exports(objective=MaximumEntropy()),
    "estimate": estimates(),
    "estimate, MaxReturn": estimates(conditioning=MaxReturn()),
    "estimate, BehaviorCloning": estimates(mlp("BehaviorCloning")),
    "estimate, doubly robust": estimates_doubly_robust,
}
