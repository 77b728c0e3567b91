"""Malicious datasets: their metadata name code, and their episodes are in other files."""

from collections.abc import Callable
from typing import Any

from tests.hostile.attack import Action, Attack, refused_or_done
from tests.hostile.world import OFFLINE, World, spec_of

NOT_USED = "which is not used without trust"
CALL: dict[str, Any] = {"entry_point": "subprocess:call", "kwargs": {"args": ["touch", "victims/ran"]}}
SYSTEM: dict[str, Any] = {"entry_point": "os:system", "kwargs": {"command": "touch victims/ran"}}
UNKNOWN = {"id": "Stranger-v0"}


def metadata(change: Callable[[dict[str, Any]], None], message: str | None, options: str = "") -> Attack:
    """Train a Decision Transformer on a dataset with modified metadata."""

    def prepare(world: World) -> Action:
        dataset = world.dataset(f"set{len(list(world.minari.glob('stranger/*')))}", change)
        return lambda: world.run(f"{OFFLINE} --dataset {dataset} --run runs/{dataset[9:]} {options}")

    return Attack(prepare, message)


def spec(message: str | None, options: str = "", **changes: Any) -> Attack:
    """Train on a dataset with a modified ``env_spec``."""
    return metadata(
        lambda described: described.update(env_spec=spec_of(described, **changes)), message, options
    )


def wrapper(entry_point: str, **kwargs: Any) -> dict[str, Any]:
    return {"additional_wrappers": [{"name": "Wrapper", "entry_point": entry_point, "kwargs": kwargs}]}


def without(*names: str, message: str, **changes: Any) -> Attack:
    """Train on a dataset with missing metadata, which Minari would read from the environment."""

    def change(described: dict[str, Any]) -> None:
        described["env_spec"] = spec_of(described, **changes)
        for name in names:
            del described[name]

    return metadata(change, message)


def in_python(use: Callable[[Any], object], message: str) -> Attack:
    """Train an agent in Python on a dataset with an entry point, and use it."""

    def prepare(world: World) -> Action:
        from rlxf import DecisionTransformer
        from rlxf.agents.decision_transformer import MaximumEntropy

        number = len(list(world.minari.glob("stranger/*")))
        dataset = world.dataset(f"set{number}", lambda it: it.update(env_spec=spec_of(it, **CALL)))
        return lambda: refused_or_done(
            lambda: use(DecisionTransformer(dataset, objective=MaximumEntropy(), device="cpu"))
        )

    return Attack(prepare, message)


def evaluated(agent: Any) -> None:
    from rlxf import evaluate

    evaluate(agent, episodes=2)


def other_command(command: str, message: str | None = None) -> Attack:
    """Run another command on a dataset with an entry point."""

    def prepare(world: World) -> Action:
        number = len(list(world.minari.glob("stranger/*")))
        dataset = world.dataset(f"set{number}", lambda it: it.update(env_spec=spec_of(it, **CALL)))
        return lambda: world.run(command.format(dataset=dataset, run=f"runs/of-set{number}"))

    return Attack(prepare, message)


ATTACKS = {
    "entry point of an unknown id": spec("which is not registered in Gymnasium", **UNKNOWN, **CALL),
    "entry point os.system": spec("which is not registered in Gymnasium", **UNKNOWN, **SYSTEM),
    "entry point with arguments, known id": spec(NOT_USED, **CALL),
    "entry point with arguments, id named": spec(None, "--env CartPole-v1", **CALL),
    "entry point in a module of the stranger": spec(None, entry_point="stranger.notes:Env"),
    "entry point in a module of Python": spec(None, entry_point="antigravity:Env"),
    "vector entry point": spec(None, vector_entry_point="stranger.notes:Vector"),
    "wrapper in a module of the stranger": spec(NOT_USED, **wrapper("stranger.notes:Wrapper")),
    "wrapper that starts a process": spec(NOT_USED, **wrapper("subprocess:call", args=["true"])),
    "wrapper that writes videos": spec(
        NOT_USED, **wrapper("gymnasium.wrappers:RecordVideo", video_folder="victims")
    ),
    "wrapper, id named": spec(None, "--env CartPole-v1", **wrapper("stranger.notes:Wrapper")),
    "arguments that read a file": spec("xml_file", id="Hopper-v5", kwargs={"xml_file": "/etc/passwd"}),
    "module in the id": spec("", id="stranger.notes:CartPole-v1"),
    "window": spec(None, kwargs={"render_mode": "human"}),
    "endless episodes": spec("max_episode_steps=", max_episode_steps=10**18),
    "time limit that is no number": spec("max_episode_steps=", max_episode_steps="stranger.notes"),
    "environment for evaluation": metadata(
        lambda it: it.update(eval_env_spec=spec_of(it, **CALL)), "which is not used without trust"
    ),
    "no observation space": without("observation_space", message="lacks observation_space", **CALL),
    "no action space": without("action_space", message="lacks action_space", **UNKNOWN, **SYSTEM),
    "no spaces": without("action_space", "observation_space", message="lacks", **CALL),
    "space of an unknown kind": metadata(
        lambda it: it.update(observation_space='{"type": "os.system"}'), "cannot be opened"
    ),
    "space that is code": metadata(
        lambda it: it.update(action_space="__import__('os').system('touch victims/ran')"), "cannot be opened"
    ),
    "another format": metadata(lambda it: it.update(data_format="arrow"), "is stored as 'arrow'"),
    "format that is a module": metadata(lambda it: it.update(data_format="stranger.notes"), "is stored as"),
    "deep env_spec": metadata(lambda it: it.update(env_spec="[" * 100_000), "cannot be opened"),
    "id in another folder": metadata(lambda it: it.update(dataset_id="../../victims/x-v0"), "has the id"),
    "evaluate in Python": in_python(evaluated, NOT_USED),
    "learn_online in Python": in_python(lambda agent: agent.learn_online(8, 1.0), NOT_USED),
    "pretrain": other_command(
        "pretrain --dataset {dataset} --updates 1 --batch-size 4 --run {run} --core.width 8 --core.heads 2"
        " --no-progress-bar"
    ),
    "datastore": other_command("evaluate runs/gtrxl --datastore {dataset} --episodes 2 --no-progress-bar"),
    "datasets": other_command("datasets"),
}
"""Attacks by name."""
