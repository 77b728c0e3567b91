"""Construction of an agent from a checkpoint file."""

import os
from typing import TYPE_CHECKING, Any

import torch

from rlxf.agents.acting_memory import state_memory
from rlxf.agents.gtrxl import checkpoint
from rlxf.agents.handover import naming_core
from rlxf.training import Archive
from rlxf.training.described import blaming_the_file
from rlxf.training.fit import check_buildable

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


def loaded(
    agent_class: "type[GTrXLPPO]",
    path: str | os.PathLike[str],
    env: Any,
    device: torch.device | str,
    policy: "str | type[GTrXLPolicy] | None",
    settings: dict[str, Any],
    sha256: str | None = None,
) -> Any:
    """Load an agent; arguments and errors are those of `GTrXLPPO.load`.

    Before any weight is allocated, the shapes required by the settings are compared with the tensors in the
    file. This check is skipped if ``policy`` or ``policy_kwargs`` are passed.
    """
    archive = checkpoint.read(path, sha256)
    own = checkpoint.settings(archive, agent_class)
    stored = own | settings
    if "policy_kwargs" not in settings:
        stored["policy_kwargs"] = checkpoint.decode_policy_kwargs(stored["policy_kwargs"])
    named = policy or checkpoint.policy_class(archive)
    given = [name for name, value in {"env": env, "policy": policy}.items() if value is not None]
    with naming_core(own["core"], settings.get("core")):
        if not {"policy", "policy_kwargs"} & {*given, *settings}:
            with blaming_the_file(settings):
                check_buildable(
                    lambda: _weightless(agent_class, archive, named, stored),
                    archive.tensors["policy"],
                    {"acting with the core's memory": state_memory(stored["core"])},
                )
        with blaming_the_file([*given, *settings]):
            agent = _built(agent_class, archive, named, env, device, stored)
        checkpoint.restore(agent, archive)
    return agent


def _weightless(agent_class: "type[GTrXLPPO]", archive: Archive, policy: Any, stored: dict[str, Any]) -> Any:
    """Build only the policy, on the meta device."""
    return _built(agent_class, archive, policy, None, "meta", stored | {"verbose": 0}).policy


def _built(
    agent_class: "type[GTrXLPPO]",
    archive: Archive,
    policy: Any,
    env: Any,
    device: torch.device | str,
    stored: dict[str, Any],
) -> Any:
    """Build an agent with these settings and new weights."""
    agent = agent_class(policy, env, device=device, **stored, _init_setup_model=False)
    if env is None:
        agent.observation_space, agent.action_space = checkpoint.spaces(archive)
        agent.n_envs = agent.ranks.part("n_envs", stored["n_envs"])
    checkpoint.check_spaces_match(agent, archive)
    agent._setup_model()
    return agent
