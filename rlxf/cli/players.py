"""The agents of runs, and environments for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.cli.checkpoints import REMEMBERING
from rlxf.cli.offline_env import make_offline_env
from rlxf.cli.pretrained import PRETRAINING
from rlxf.cli.task import Task, check_described, json_object
from rlxf.cli.technique_names import read
from rlxf.evaluation.targets import checked_targets
from rlxf.training import RunFolder, load_normalizer

Device = Literal["auto", "cpu", "cuda"]
GTRXL, OFFLINE = "gtrxl", "decision_transformer"
"""Agents as ``config.json`` names them."""
KNOWN = f"; known are {GTRXL} and {OFFLINE}"
WEIGHTS = ", which cannot act: its weights are for rlxf train --pretrained"
Agent = GTrXLPPO | DecisionTransformer


def make_env(
    run: RunFolder, env: str | None, env_kwargs: dict[str, Any], n_envs: int, trust: bool = False
) -> VecEnv:
    """Environments for the agent of a run; they show raw observations.

    Args:
        run: of ``rlxf train``.
        env: Gymnasium id; None for the one trained on, or that of the data.
        env_kwargs: arguments of the environment; without ``env`` they change those of the run.
        n_envs: how many.
        trust: use the full description of the environment in the run and its data, including code.

    Raises:
        ValueError, TypeError: if there is no such environment, the agent of the run is unknown, or its
            environment needs trust.
    """
    if agent_name(run) == GTRXL:
        return Task.of_run(run.config, env, env_kwargs, trust).make(n_envs, None)
    agent = DecisionTransformer.load(run.checkpoint, device="cpu", trust=trust)
    if trust and agent.facts.env_wrappers:  # they are code: only the data hold them
        agent = DecisionTransformer.load(run.checkpoint, agent.facts.dataset_ids, device="cpu", trust=True)
    if env is None and not trust:
        check_described(run.config, env_kwargs)
    if env is not None:
        return make_offline_env(agent, env, env_kwargs, n_envs)
    kwargs = json_object(run.config.get("env_kwargs", {})) | json_object(env_kwargs)
    named = run.config.get("env")
    return make_offline_env(agent, None if named == agent.facts.env_id else named, kwargs, n_envs)


def load_agent(run: RunFolder, env: VecEnv, checkpoint: Path, device: Device) -> Agent:
    """The agent of a run, ready to play in ``env``. Where observations were normalised, it knows how.

    Args:
        run: of ``rlxf train``.
        env: of `make_env`.
        checkpoint: one of the run's.
        device: where tensors live.

    Raises:
        ValueError, OSError: if they do not fit, or a file is missing or damaged.
    """
    if agent_name(run) == OFFLINE:
        agent = DecisionTransformer.load(checkpoint, device=device)
        agent.check_env(env)
        return agent
    return GTrXLPPO.load(checkpoint, env=as_in_training(run, env, checkpoint), device=device)


def as_in_training(run: RunFolder, env: VecEnv, checkpoint: Path) -> VecEnv:
    """Normalise the observations of ``env`` as in the training of a checkpoint; rewards stay raw.

    The statistics of the checkpoint are used and not updated.
    """
    if not run.config.get("normalize_observations", False):
        return env
    shown = load_normalizer(run.best_normalizer if checkpoint == run.best else run.normalizer, env)
    shown.training = shown.norm_reward = False
    return shown


def remembering(
    agents: Mapping[str, Agent], datasets: Sequence[str], head: str | None, progress_bar: bool
) -> dict[str, Agent]:
    """The agents under names that say so, made to remember these datasets; with none, as they are.

    Args:
        agents: by the name of the checkpoint.
        datasets: Minari ids.
        head: how they are read: a name or JSON; None for kNN-LM.
        progress_bar: show one.

    Raises:
        ValueError: if an agent cannot, there is no such head, or a dataset does not fit.
    """
    if not datasets:
        if head is not None:
            raise ValueError(f"head {head} says how trajectories are remembered: name them with --remember")
        return dict(agents)
    for agent in agents.values():
        agent.remember(datasets, read("head", head or "KNNLM"), progress_bar=progress_bar)
    return {f"{name}{REMEMBERING}": agent for name, agent in agents.items()}


def targets_of(agents: Sequence[Any], asked: Sequence[float]) -> Sequence[float] | None:
    """What Decision Transformers are asked for: the highest return in their data, unless said otherwise.

    None for agents that cannot be asked.

    Raises:
        ValueError: if others are asked, both kinds are to play, or a target is not finite or there twice.

    Warns:
        UserWarning: if a target lies outside of the data of all agents.
    """
    askable = [agent for agent in agents if isinstance(agent, DecisionTransformer)]
    if askable and len(askable) < len(agents):
        raise ValueError(
            "only Decision Transformers are asked for a return: their runs and others cannot play together"
        )
    if asked and not askable:
        raise ValueError(f"target_returns are for Decision Transformers alone, got {list(asked)}")
    if not askable:
        return None
    lows, highs = zip(*(agent.return_range for agent in askable), strict=True)
    return checked_targets(asked or [max(highs)], (min(lows), max(highs)))


def agent_name(run: RunFolder) -> str:
    """Which agent the run is of.

    Raises:
        ValueError: if it is none that is known here.
    """
    name = run.config.get("agent")
    if name not in (GTRXL, OFFLINE):
        raise ValueError(f"{run.path} is a run of {name!r}{WEIGHTS if name == PRETRAINING else KNOWN}")
    return name
