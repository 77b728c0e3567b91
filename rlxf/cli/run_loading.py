"""Agents and environments of runs, and the reports of their checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli.finalize_run import DATASTORE_SUFFIX
from rlxf.cli.options.common import Device
from rlxf.cli.options.env_options import EnvOptions, check_env_trust, json_object
from rlxf.cli.options.offline_options import make_offline_env
from rlxf.cli.output import print_out
from rlxf.cli.spec_options import parse_technique
from rlxf.evaluation import Report, TargetSweep
from rlxf.evaluation.sweep import validate_targets
from rlxf.training import RunFolder, load_normalizer

GTRXL, OFFLINE, PRETRAINING = "gtrxl", "decision_transformer", "pretraining"
"""Names of agents in ``config.json``."""
HEADINGS = {
    "last": "Last checkpoint, {}",
    "best": "Best checkpoint, {}, selected on other episodes during training",
    f"last{DATASTORE_SUFFIX}": "Last checkpoint, {}, with a datastore of trajectories",
    f"best{DATASTORE_SUFFIX}": "Best checkpoint, {}, with a datastore of trajectories",
}
"""Checkpoint name -> title of its report."""
SOURCES: dict[str, Any] = {PRETRAINING: MaskedPretraining, OFFLINE: DecisionTransformer, GTRXL: GTrXLPPO}
"""Name of an agent -> class with weights for `load_initial_weights`."""
Agent = GTrXLPPO | DecisionTransformer


def load_initial_weights(agent: Any, folder: Path | None) -> None:
    """Load the weights of the run in ``folder`` into an agent; do nothing if ``folder`` is None.

    Raises:
        OSError, ValueError: if the run does not exist, its agent is unknown, or its weights do not fit.
    """
    if folder is None:
        return
    run = RunFolder.open(folder)
    name = run.config.get("agent")
    if name not in SOURCES:
        raise ValueError(f"{run.path} is a run of agent {name!r}; supported agents are {', '.join(SOURCES)}")
    agent.load_pretrained(SOURCES[name].load(run.checkpoint, device="cpu"))


def make_env(
    run: RunFolder,
    env: str | None,
    env_kwargs: dict[str, Any],
    n_envs: int,
    trust: bool = False,
    seed: int | None = None,
) -> VecEnv:
    """Make environments for the agent of a run, with raw observations.

    Args:
        run: run of ``rlxf train``.
        env: Gymnasium id; None for the environment of the training or of the datasets.
        env_kwargs: arguments of the environment. Without ``env`` they update those of the run.
        n_envs: number of environments.
        trust: use the full description of the environment in the run and its datasets, including code.
        seed: seed of the environments of a `GTrXLPPO`; None for random seeds.

    Raises:
        ValueError, TypeError: if the environment does not exist, the agent of the run is unknown, or its
            environment needs trust.
    """
    if agent_name(run) == GTRXL:
        return EnvOptions.of_run(run.config, env, env_kwargs, trust).make(n_envs, seed)
    agent = DecisionTransformer.load(run.checkpoint, device="cpu", trust=trust)
    if trust and agent.dataset_info.env_wrappers:  # wrappers are code: only the datasets contain them
        agent = DecisionTransformer.load(
            run.checkpoint, agent.dataset_info.dataset_ids, device="cpu", trust=True
        )
    if env is None and not trust:
        check_env_trust(run.config, env_kwargs)
    if env is not None:
        return make_offline_env(agent, env, env_kwargs, n_envs)
    kwargs = json_object(run.config.get("env_kwargs", {})) | json_object(env_kwargs)
    named = run.config.get("env")
    return make_offline_env(agent, None if named == agent.dataset_info.env_id else named, kwargs, n_envs)


def load_agent(run: RunFolder, env: VecEnv, checkpoint: Path, device: Device) -> Agent:
    """Load the agent of a run to act in ``env``, with the normalization of its training.

    Args:
        run: run of ``rlxf train``.
        env: environments made by `make_env`.
        checkpoint: a checkpoint of the run.
        device: device of the tensors.

    Raises:
        ValueError, OSError: if agent and environments do not match, or a file is missing or damaged.
    """
    if agent_name(run) == OFFLINE:
        agent = DecisionTransformer.load(checkpoint, device=device)
        agent.check_env(env)
        return agent
    return GTrXLPPO.load(checkpoint, env=normalize_as_in_training(run, env, checkpoint), device=device)


def normalize_as_in_training(run: RunFolder, env: VecEnv, checkpoint: Path) -> VecEnv:
    """Normalize the observations of ``env`` with the statistics of a checkpoint, without updating them.

    Rewards are not normalized.
    """
    if not run.config.get("normalize_observations", False):
        return env
    normalized = load_normalizer(run.best_normalizer if checkpoint == run.best else run.normalizer, env)
    normalized.training = normalized.norm_reward = False
    return normalized


def with_datastore(
    agents: Mapping[str, Agent], datasets: Sequence[str], head: str | None, progress_bar: bool
) -> dict[str, Agent]:
    """Attach a datastore of these datasets to each agent, and add `DATASTORE_SUFFIX` to the names.

    Without datasets, the agents and names are returned unchanged.

    Args:
        agents: checkpoint name -> agent.
        datasets: Minari ids.
        head: name or JSON description of the output head that reads the datastore; None for kNN-LM.
        progress_bar: show a progress bar.

    Raises:
        ValueError: if an agent does not support datastores, the head does not exist, or a dataset does not
            match the agent.
    """
    if not datasets:
        if head is not None:
            raise ValueError(f"--head {head} needs datasets of trajectories: pass them with --remember")
        return dict(agents)
    for agent in agents.values():
        agent.attach_datastore(datasets, parse_technique("head", head or "KNNLM"), progress_bar=progress_bar)
    return {f"{name}{DATASTORE_SUFFIX}": agent for name, agent in agents.items()}


def default_target_returns(agents: Sequence[Any], requested: Sequence[float]) -> Sequence[float] | None:
    """Return the target returns of Decision Transformers, by default the largest return in their data.

    None is returned for agents that are not conditioned on a return.

    Raises:
        ValueError: if returns are requested from other agents, agents of both kinds are given, or a target
            is not finite or occurs twice.

    Warns:
        UserWarning: if a target lies outside the returns in the data of all agents.
    """
    conditioned = [agent for agent in agents if isinstance(agent, DecisionTransformer)]
    if conditioned and len(conditioned) < len(agents):
        raise ValueError(
            "Decision Transformers need target returns and other agents have none: use runs of one kind"
        )
    if requested and not conditioned:
        raise ValueError(f"target_returns apply to Decision Transformers only, got {list(requested)}")
    if not conditioned:
        return None
    lows, highs = zip(*(agent.return_range for agent in conditioned), strict=True)
    return validate_targets(requested or [max(highs)], (min(lows), max(highs)))


def agent_name(run: RunFolder) -> str:
    """Return the name of the agent of a run.

    Raises:
        ValueError: if this agent is not supported here.
    """
    name = run.config.get("agent")
    if name in (GTRXL, OFFLINE):
        return name
    advice = f"; supported agents are {GTRXL} and {OFFLINE}"
    if name == PRETRAINING:
        advice = ", which cannot act: use its weights with rlxf train --pretrained"
    raise ValueError(f"{run.path} is a run of agent {name!r}{advice}")


def heading(name: str, agent: Any) -> str:
    """Return the title of the report on a checkpoint, with its steps or, offline, its updates."""
    unit = "update" if isinstance(agent, DecisionTransformer) else "step"
    return HEADINGS[name].format(f"{unit} {agent.num_timesteps:,}")


def print_reports(agents: Mapping[str, Any], reports: Mapping[str, Report | TargetSweep]) -> None:
    """Print one table per checkpoint. If the best checkpoint equals the last one, only one table is printed.

    Args:
        agents: checkpoint name -> agent, of the last and the best checkpoint.
        reports: checkpoint name -> report.
    """
    first, *others = agents
    equal = [name for name in others if _equal_checkpoints(agents[first], agents[name])]
    shown = {name: report for name, report in reports.items() if name not in equal}
    for name, report in shown.items():
        table = report.table()
        table.title = f"{heading(name, agents[name])}\n{table.title}"
        print_out(table)
    if equal:
        print_out("the best checkpoint has the same weights as the last one, so one table is shown for both")


def _equal_checkpoints(one: Any, other: Any) -> bool:
    """Return whether two agents have the same step and weights."""
    if one.num_timesteps != other.num_timesteps or one.core != other.core:
        return False
    weights, others = one.policy.state_dict(), other.policy.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights
    )
