"""Agents and environments of the runs of the commands."""

import reprlib
from collections.abc import Collection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.mlp import BehaviorCloning, ReturnConditionedMLP
from rlxf.agents.offline.agent import OfflineAgent
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli.commands import COMMANDS
from rlxf.cli.env_options import EnvOptions, merge_env_kwargs
from rlxf.cli.normalization import normalize_as_in_training
from rlxf.cli.options import Device, json_object
from rlxf.data.findings import describe_missing_environment
from rlxf.training import RunFolder
from rlxf.utils.names import short_repr
from rlxf.utils.run_files import CONFIG
from rlxf.utils.warnings import warn_user

GTRXL, OFFLINE, PRETRAINING = "gtrxl", "decision_transformer", "pretraining"
CLONING, RVS = "behavior_cloning", "return_conditioned_mlp"
"""Names of agents in ``config.json``."""
SOURCES: dict[str, Any] = {PRETRAINING: MaskedPretraining, OFFLINE: DecisionTransformer, GTRXL: GTrXLPPO}
"""Name of an agent -> class with weights for `load_initial_weights`."""
OFFLINE_AGENTS: dict[str, type[OfflineAgent]] = {
    OFFLINE: DecisionTransformer,
    CLONING: BehaviorCloning,
    RVS: ReturnConditionedMLP,
}
"""Name of an agent that is trained offline and acts -> its class."""
AGENTS: dict[str, Any] = SOURCES | OFFLINE_AGENTS
"""Name of an agent -> its class."""
TRANSFORMERS = (GTRXL, OFFLINE)
"""Names of the agents with a transformer that act."""
TRAINING_COMMANDS = {
    GTRXL: "train gtrxl",
    OFFLINE: "train dt",
    PRETRAINING: "pretrain",
    CLONING: "train bc",
    RVS: "train rvs",
}
"""Name of an agent -> words of the command that trains it."""
Agent = GTrXLPPO | OfflineAgent


def command_class(run: RunFolder) -> Any:
    """Return the class of the command that trained the agent of a run; KeyError for other agents."""
    return resolve_name(COMMANDS[TRAINING_COMMANDS[run.config["agent"]]])


def agent_name(run: RunFolder, supported: Collection[str] = (GTRXL, *OFFLINE_AGENTS)) -> str:
    """Return the name of the agent of a run.

    Args:
        run: folder of the run.
        supported: names of the agents that are supported here.

    Raises:
        ValueError: if this agent is not supported here.
    """
    name = run.config.get("agent")
    if name in supported:
        return str(name)
    advice = f"; supported agents are {', '.join(supported)}"
    if name == PRETRAINING:
        advice = ", which cannot act: use its weights with rlxf train --pretrained"
    raise ValueError(f"{run.path} is a run of agent {short_repr(name)}{advice}")


def dataset_ids(run: RunFolder) -> list[str]:
    """Return the ids of the datasets on which a run was trained.

    Raises:
        ValueError: if the ``config.json`` of the run does not contain them as a list of texts.
    """
    ids = run.config.get("dataset")
    if not isinstance(ids, list) or not ids or not all(isinstance(each, str) for each in ids):
        raise ValueError(
            f"{run.path / CONFIG} has dataset = {reprlib.repr(ids)}, which must be a list of Minari ids; "
            f"correct it"
        )
    return ids


def check_weights_trust(run: RunFolder) -> None:
    """Raise ValueError if the ``config.json`` of a run names another run, with whose weights it begins."""
    if run.config.get("pretrained") is not None:
        raise ValueError(
            f"the training of {run.path} begins with the weights of another folder, "
            f"{reprlib.repr(run.config['pretrained'])}: add --trust if you trust the authors of the run, or "
            f"choose the weights of a new run with rlxf train --config and --pretrained"
        )


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
        raise ValueError(
            f"{run.path} is a run of agent {short_repr(name)}; supported agents are {', '.join(SOURCES)}"
        )
    agent.load_pretrained(SOURCES[name].load(run.final_checkpoint, device="cpu"))


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
    name = agent_name(run)
    if name == GTRXL:
        return EnvOptions.of_run(run.config, env, env_kwargs, trust).make(n_envs, seed)
    agent = OFFLINE_AGENTS[name].load(run.final_checkpoint, device="cpu", trust=trust)
    if trust and agent.dataset_info.env_wrappers:  # wrappers are code: only the datasets contain them
        agent = OFFLINE_AGENTS[name].load(
            run.final_checkpoint, agent.dataset_info.dataset_ids, device="cpu", trust=True
        )
    if env is None:
        env_kwargs = merge_env_kwargs(run.config, env_kwargs, trust)
        named = run.config.get("env")
        env = None if named == agent.dataset_info.env_id else named
    return make_offline_env(agent, env, env_kwargs, n_envs)


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
    name = agent_name(run)
    if name in OFFLINE_AGENTS:
        agent = OFFLINE_AGENTS[name].load(checkpoint, device=device)
        agent.check_env(env)
        return agent
    return GTrXLPPO.load(checkpoint, env=normalize_as_in_training(run, env, checkpoint), device=device)


def load_agent_alone(run: RunFolder, checkpoint: Path, device: Device, trust: bool = False) -> Agent:
    """Load the agent of a run to act on logged observations, with the normalization of its training.

    An environment is made only if the run normalized observations, because ``VecNormalize`` needs one.

    Args:
        run: run of ``rlxf train``.
        checkpoint: a checkpoint of the run.
        device: device of the tensors.
        trust: use the full description of the environment in the run, including code.

    Raises:
        ValueError, OSError: if the agent of the run cannot act, or a file is missing or damaged.
    """
    name = agent_name(run)
    if name in OFFLINE_AGENTS:
        return OFFLINE_AGENTS[name].load(checkpoint, device=device)
    if run.config.get("normalize_observations", False):
        return load_agent(run, make_env(run, None, {}, 1, trust), checkpoint, device)
    return GTrXLPPO.load(checkpoint, device=device)


def make_offline_env(agent: OfflineAgent, env: str | None, env_kwargs: dict[str, Any], n_envs: int) -> VecEnv:
    """Make environments with the spaces of the agent. Observations do not contain the return-to-go.

    Args:
        agent: agent whose datasets may name an environment.
        env: Gymnasium id; None for the environment of the datasets.
        env_kwargs: arguments of the environment. They update those of the datasets, if it is theirs.
        n_envs: number of environments.

    Raises:
        ValueError: if neither ``env`` nor the datasets name an environment, it is unknown, its spaces differ
            from those of the datasets, or only the datasets name it and their description needs trust.
        TypeError: if the environment does not accept the arguments.

    Warns:
        UserWarning: if ``env`` is that of the datasets, and their description is ignored because it needs
            trust.
    """
    check_env_named(agent, env)
    if acts_in_env_of_data(agent, env, env_kwargs):
        return agent.make_env(n_envs, env_kwargs=json_object(env_kwargs))
    if untrusted := _untrusted(agent, env, env_kwargs):
        warn_user(
            f"the data specify {', '.join(untrusted)} for {env}; these are ignored: pass --env-kwargs, or "
            f"--trust-data (--trust for a run) if you trust the author of the data"
        )
    made = EnvOptions(env=str(env), env_kwargs=env_kwargs).make(n_envs, None)
    agent.check_env(made)
    return made


def acts_in_env_of_data(agent: OfflineAgent, env: str | None, env_kwargs: dict[str, Any]) -> bool:
    """Return whether `make_offline_env` uses the description of the environment in the datasets."""
    named = env == agent.dataset_info.env_id and agent.dataset_info.env is not None
    return env is None or (named and not _untrusted(agent, env, env_kwargs))


def _untrusted(agent: OfflineAgent, env: str | None, env_kwargs: dict[str, Any]) -> list[str]:
    """Return the parts of the description of ``env`` in the datasets that are not trusted."""
    own = agent.dataset_info.env if env == agent.dataset_info.env_id else None
    return [] if own is None or agent.trust else list(own.needs_trust(json_object(env_kwargs)))


def check_env_named(agent: OfflineAgent, env: str | None, otherwise: str = "") -> None:
    """Raise ValueError unless the datasets or ``env`` name an environment.

    Args:
        agent: agent trained on the datasets.
        env: Gymnasium id, or None.
        otherwise: alternative advice, appended to the message.
    """
    if env is None and agent.dataset_info.env_id is None:
        ids = ", ".join(agent.dataset_info.dataset_ids)
        problem = describe_missing_environment(agent.trajectories.env_ids if agent.trajectories else ())
        raise ValueError(f"the datasets {ids} {problem}: pass --env ID{otherwise}")
