"""Runs that are shared: checks of a downloaded run, and the files and the model card of an upload."""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rlxf.cli.output import print_out
from rlxf.cli.playback import IMAGES, Task, play_episodes, prepare_agent
from rlxf.cli.reports import checkpoints_of, select_checkpoints, shared_checkpoint
from rlxf.cli.runs import AGENTS, agent_name
from rlxf.cli.shared_commands import teacher_of, training_command_line, trust_of
from rlxf.evaluation.agents import is_return_conditioned_agent
from rlxf.evaluation.episodes import DEFAULT_SEED
from rlxf.evaluation.video import MAX_STEPS, FrameRecorder
from rlxf.sharing.card import ModelCard, Score, read_scores
from rlxf.sharing.download import CARD, FILES, VIDEO
from rlxf.training import RunFolder, read_archive
from rlxf.training.strict_json import load_json_object
from rlxf.utils.gif import encode_gif
from rlxf.utils.run_files import CHECKPOINT, CONFIG, EVALUATION, NORMALIZER, SHARED
from rlxf.utils.warnings import warn_user


def check_shared_run(folder: Path) -> None:
    """Raise an error unless a folder is a run of a known agent whose checkpoints can be loaded.

    Raises:
        ValueError, TypeError, OSError: if a file is missing, damaged, or not one that rlxf writes.
    """
    run = RunFolder.open(folder)
    for checkpoint in checkpoints_of(run).values():
        AGENTS[agent_name(run)].load(checkpoint, device="cpu")
    for statistics in (run.normalizer, run.best_normalizer):
        if statistics.is_file():
            read_archive(statistics, FILES[CHECKPOINT])
    read_evaluation(run)


def read_evaluation(run: RunFolder) -> dict[str, Any]:
    """Return checkpoint name -> its report in ``evaluation.json``; empty without this file.

    Raises:
        ValueError: if the file is too large or not a JSON object.
    """
    path = run.path / EVALUATION
    if not path.is_file():
        return {}
    return load_json_object(path, "remove it")


def shared_files(run: RunFolder, checkpoint: str) -> dict[str, Path | bytes]:
    """Return the files of a run to upload, by name in the repository, without the model card.

    Args:
        run: the run.
        checkpoint: "last" or "best"; the best checkpoint and its statistics get the names of the last one.
    """
    best = checkpoint == "best"
    files: dict[str, Path | bytes] = {
        CONFIG: run.path / CONFIG,
        CHECKPOINT: checkpoints_of(run)[checkpoint],
    }
    statistics = run.best_normalizer if best else run.normalizer
    if statistics.is_file():
        files[NORMALIZER] = statistics
    report = _report(run, checkpoint)
    if report is not None:
        files[EVALUATION] = json.dumps({"last": report}).encode()
    if (name := shared_checkpoint(run, checkpoint)) != "last":
        files[SHARED] = json.dumps({"checkpoint": name}).encode()
    return files


def shared_content(
    run: RunFolder, checkpoint: str, agent: Any, folder: str, video: bool, trust: bool, **others: str | None
) -> dict[str, Path | bytes]:
    """Return `shared_files` with the model card, and with a video of one episode if it can be recorded.

    Args:
        run: the run.
        checkpoint: "last" or "best".
        agent: the agent of this checkpoint.
        folder: folder in which the shared run is used.
        video: record a video.
        trust: use the full description of the environment in the run, including code, for the video.
        others: repository and commit of `ModelCard`.
    """
    files = shared_files(run, checkpoint)
    episode = record_video(run, checkpoint, trust) if video else None
    if episode is not None:
        files[VIDEO] = episode
    parts = {"video": episode is not None, "normalizer": NORMALIZER in files}
    files[CARD] = model_card(run, folder, checkpoint, agent, **parts, **others)
    return files


def load_shared_agent(run: RunFolder, checkpoint: str) -> Any:
    """Return the agent of a checkpoint to share, "last" or "best", after checks of the run.

    Raises:
        ValueError, TypeError, OSError: if a file is missing, damaged, or not one that rlxf writes.

    Warns:
        UserWarning: if the checkpoint changed after its evaluation.
    """
    (path,) = select_checkpoints(run, checkpoint).values()
    agent = AGENTS[agent_name(run)].load(path, device="cpu")
    read_scores_of(run, checkpoint)
    if checkpoint in read_evaluation(run) and _has_changed(run, checkpoint):
        warn_user(f"{path} changed after its evaluation, so the model card has no results")
    return agent


def read_scores_of(run: RunFolder, checkpoint: str) -> list[Score]:
    """Return the scores of a checkpoint in the final evaluation of a run; empty if it was not evaluated.

    They are also empty if the checkpoint changed afterwards, for example by ``rlxf calibrate``.

    Raises:
        ValueError: if ``evaluation.json`` is malformed.
    """
    report = _report(run, checkpoint)
    return [] if report is None else read_scores(report)


def _report(run: RunFolder, checkpoint: str) -> Any:
    """Return the report of a checkpoint in the final evaluation; None if there is none, or it is outdated."""
    return None if _has_changed(run, checkpoint) else read_evaluation(run).get(checkpoint)


def _has_changed(run: RunFolder, checkpoint: str) -> bool:
    """Return whether a checkpoint changed after the run was complete."""
    name = checkpoints_of(run)[checkpoint].name
    return run.completion is not None and name in run.completion.changed(run.path)


def model_card(run: RunFolder, folder: str, checkpoint: str, agent: Any, **others: Any) -> bytes:
    """Return the text of the model card of a run in UTF-8, the file `CARD` next to its checkpoint.

    Args:
        run: the run.
        folder: folder in which the shared run is used.
        checkpoint: "last" or "best".
        agent: the agent of this checkpoint.
        others: normalizer, video, repository and commit of `ModelCard`.
    """
    info = getattr(agent, "dataset_info", None)
    scores = read_scores_of(run, checkpoint)
    card = ModelCard(
        folder,
        type(agent).__name__,
        run.config.get("env") or getattr(info, "env_id", None),
        f"{agent.num_timesteps:,} {getattr(agent, 'progress_unit', 'step')}s",
        shared_checkpoint(run, checkpoint),
        scores,
        training_command_line(run),
        () if info is None else tuple(info.dataset_ids),
        make_env=make_env_expression(run, agent),
        target=_target(agent, scores),
        trust=trust_of(run),
        teacher=teacher_of(run),
        **others,
    )
    return card.text().encode()


def _target(agent: Any, scores: Sequence[Score]) -> float | None:
    """Return the requested return with the highest mean, or the highest of the data; None without targets."""
    if not is_return_conditioned_agent(agent):
        return None
    best = max(scores, key=lambda score: score.mean, default=None)
    target = math.nan if best is None or best.target is None else best.target
    return float(target if math.isfinite(target) else agent.return_range[1])


def python_literal(value: Any) -> str:
    """Return a JSON value as a Python expression, with double quotes around texts."""
    if isinstance(value, dict):
        entries = (f"{python_literal(key)}: {python_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def make_env_expression(run: RunFolder, agent: Any) -> str | None:
    """Return a Python expression that makes an environment of a run; None if its settings name none."""
    env, kwargs = run.config.get("env"), run.config.get("env_kwargs") or {}
    info = getattr(agent, "dataset_info", None)
    if info is not None and env in (None, info.env_id) and not kwargs:
        return None if info.env_id is None else "agent.make_env(1)"
    if not isinstance(env, str) or not isinstance(kwargs, dict):
        return None
    arguments = [json.dumps(env), "n_envs=1", *([f"env_kwargs={python_literal(kwargs)}"] if kwargs else [])]
    for name in ("previous_reward", "previous_transition"):
        if info is None and run.config.get(name) is True:
            arguments.append(f"{name}=True")
    return f"make_vec_env({', '.join(arguments)})"


def record_video(run: RunFolder, checkpoint: str, trust: bool) -> bytes | None:
    """Play an episode with the agent of a run, and return its first frames as a GIF.

    If the environment cannot be made or rendered, print the reason and return None.
    """
    try:
        task = Task.of_run(run, None, {}, trust)
        recorder = FrameRecorder(task.make(IMAGES), MAX_STEPS)
        agent, env = prepare_agent(run, checkpoints_of(run)[checkpoint], recorder, "cpu")
        with closing(env):
            play_episodes(agent, env, 1, DEFAULT_SEED)
        return encode_gif(recorder.frames(1), task.fps)
    except Exception as error:  # missing drivers, displays and packages raise various exceptions
        print_out(" ".join(f"no video: {error}".split()))
        return None
