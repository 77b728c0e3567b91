"""TensorBoard events: descriptions of tags, layout of charts, texts, hyperparameters, later evaluations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
    DATA_CLASS_SCALAR,
    Summary,
    SummaryMetadata,
)
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from rlxf.training.resumed_logger import EVALUATION_EVENTS, EVENTS, LogPosition, cut_events
from rlxf.training.strict_json import dump_json
from rlxf.utils.dtypes import to_builtin
from rlxf.utils.tensorboard import writers

RETURN_CHART = "mean return of evaluations, 95% interval"
INTERVAL_TAGS = ("eval/mean_reward", "eval/ci_low", "eval/ci_high")
"""Title of the chart with an interval, and its tags: value, lower and upper end."""
DESCRIPTIONS = {
    "rollout/ep_rew_mean": "Mean return of the last 100 training episodes, with exploration.",
    "rollout/ep_len_mean": "Mean number of steps of the last 100 training episodes.",
    "rollout/success_rate": "Fraction of successful episodes among the last 100 training episodes.",
    "eval/mean_reward": "Mean return of the episodes of an evaluation, without exploration.",
    "eval/ci_low": "Lower end of the 95% bootstrap interval of the mean return.",
    "eval/ci_high": "Upper end of the 95% bootstrap interval of the mean return.",
    "eval/iqm": "Interquartile mean of the returns of an evaluation.",
    "eval/success_rate": "Fraction of successful episodes of an evaluation.",
    "eval/normalized_score": "Mean return, with 0 and 100 at the reference scores.",
    "eval/spearman": "Rank correlation of target returns and achieved returns.",
    "train/loss": "Mean of the training loss over the updates since the last row of the log.",
    "train/policy_gradient_loss": "Clipped surrogate loss of PPO.",
    "train/value_loss": "Mean squared error of the values.",
    "train/entropy_loss": "Negative mean entropy of the policy.",
    "train/approx_kl": "Approximate KL divergence between the policies before and after an update.",
    "train/clip_fraction": "Fraction of ratios that PPO clips.",
    "train/explained_variance": "Explained variance of the values: 1 is perfect, 0 or less is useless.",
    "train/grad_norm": "Norm of the gradient before clipping.",
    "validation/loss": "Loss on held-out episodes.",
    "memory/filled": "Fraction of the memory that belongs to the current episode.",
    "time/fps": "Environment steps per second, learning included.",
}
"""Tag -> description that TensorBoard shows at its card; docs/reference/tensorboard.md has all tags."""


class DescribedWriter(SummaryWriter):
    """SummaryWriter whose scalars have the descriptions in `DESCRIPTIONS`."""

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **options: Any
    ) -> None:
        """Write a scalar, with its description if there is one; arguments as in SummaryWriter."""
        description = DESCRIPTIONS.get(tag)
        if description is None or args or options:
            super().add_scalar(tag, scalar_value, global_step, *args, **options)
            return
        metadata = SummaryMetadata(
            summary_description=description,
            plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
            data_class=DATA_CLASS_SCALAR,
        )
        value = Summary.Value(tag=tag, simple_value=float(scalar_value), metadata=metadata)
        writer: Any = self._get_file_writer()
        writer.add_summary(Summary(value=[value]), global_step)


def described_output(folder: Path, **options: Any) -> TensorBoardOutputFormat:
    """Return SB3's TensorBoard output for a folder, with descriptions of tags.

    Args:
        folder: folder of the events.
        **options: further arguments of SummaryWriter.
    """
    output = TensorBoardOutputFormat.__new__(TensorBoardOutputFormat)
    output.writer = DescribedWriter(log_dir=str(folder), **options)
    output._is_closed = False
    return output


def resumed_output(folder: Path, position: LogPosition, step: int) -> TensorBoardOutputFormat:
    """Return the output that continues the events of a folder at a position; later events are removed.

    A running TensorBoard discards the later events, too (``purge_step``).

    Args:
        folder: folder of the events.
        position: position with the size of each event file that is kept.
        step: last step that is kept.
    """
    cut_events(folder, position.events)
    return described_output(folder, purge_step=step + 1)


def write_layout(logger: Logger, losses: Sequence[str], targets: bool = False) -> None:
    """Write the charts of TensorBoard's tab "Custom Scalars", if the logger writes events.

    They are the mean return of evaluations with its interval, the return of training episodes, and losses.

    Args:
        logger: logger of the training.
        losses: tags of the losses, one chart each.
        targets: add a chart of the mean returns of all target returns.
    """
    evaluation: dict[str, list[Any]] = {RETURN_CHART: ["Margin", list(INTERVAL_TAGS)]}
    if targets:
        evaluation["mean return of each target"] = ["Multiline", [r"eval/target_.*/return_mean$"]]
    training = {"return of training episodes": _lines("rollout/ep_rew_mean")}
    layout = {
        "Evaluation": evaluation,
        "Training": training,
        "Losses": {tag: _lines(tag) for tag in losses},
    }
    for writer in writers(logger):
        writer.add_custom_scalars(layout)
        writer.flush()


def _lines(tag: str) -> list[Any]:
    """Return a chart of the lines of one tag, which TensorBoard reads as a regular expression."""
    return ["Multiline", [f"{re.escape(tag)}$"]]


def write_run_texts(logger: Logger, command: str, config: Mapping[str, Any], step: int) -> None:
    """Write the command and the configuration of a run for TensorBoard's tab "Text", if it writes events.

    Args:
        logger: logger of the training.
        command: command line that started or resumed the training; empty if there is none.
        config: configuration of the run.
        step: number of steps or updates before the command.
    """
    rows = [f"| {_cell(name)} | {_cell(dump_json(value).decode())} |" for name, value in config.items()]
    for writer in writers(logger):
        if command:
            writer.add_text("run/command", "\n".join(f"    {line}" for line in command.splitlines()), step)
        writer.add_text("run/configuration", "\n".join(["| option | value |", "|---|---|", *rows]), step)
        writer.flush()


def _cell(text: str) -> str:
    """Return a text as the cell of a Markdown table, in which no character has a meaning."""
    return re.sub(r"[^\w\s.,:/-]", lambda match: f"&#{ord(match[0])};", " ".join(text.split()))


class EvaluationWriter(DescribedWriter):
    """SummaryWriter that writes the tags ``eval/NAME`` of a report as ``GROUP/NAME``.

    Args:
        group: group of the tags, e.g. ``evaluation_best``.
        folder: folder of the events.
        suffix: end of the name of the event file.
    """

    def __init__(self, group: str, folder: Path, suffix: str):
        super().__init__(str(folder), filename_suffix=suffix)
        self._group = group

    def _renamed(self, tag: str) -> str:
        return f"{self._group}/{tag.removeprefix('eval/')}"

    def add_scalar(self, tag: str, *args: Any, **options: Any) -> None:
        """Write a scalar; arguments as in SummaryWriter."""
        super().add_scalar(self._renamed(tag), *args, **options)

    def add_figure(self, tag: str, *args: Any, **options: Any) -> None:
        """Write a figure; arguments as in SummaryWriter."""
        super().add_figure(self._renamed(tag), *args, **options)

    def add_text(self, tag: str, *args: Any, **options: Any) -> None:
        """Write a text; arguments as in SummaryWriter."""
        super().add_text(self._renamed(tag), *args, **options)


HyperparameterValue = bool | int | float | str


def to_hyperparameters(values: Mapping[str, Any]) -> dict[str, HyperparameterValue]:
    """Return values for `write_hyperparameters`, without those that are None.

    Scalars of NumPy become Python numbers. Other objects become their representation as text.
    """
    numbers = {name: to_builtin(value) for name, value in values.items()}
    return {
        name: x if isinstance(x, HyperparameterValue) else repr(x)
        for name, x in numbers.items()
        if x is not None
    }


def write_hyperparameters(logger: Logger, values: Mapping[str, HyperparameterValue]) -> None:
    """Write the hyperparameters of a run for TensorBoard's HPARAMS tab, if the logger writes events.

    This function only writes the session start summary. SB3's ``HParam`` also writes an experiment summary,
    which lists columns. TensorBoard applies the experiment summary of one run to all runs of a log folder,
    which hides the hyperparameters of other agents. Without it, TensorBoard shows the hyperparameters and
    scalars of all runs.
    """
    for writer in writers(logger):
        _, start, _ = hparams(dict(values), {})
        assert writer.file_writer is not None
        writer.file_writer.add_summary(start)
        writer.flush()


@contextmanager
def evaluation_events(folder: Path, name: str) -> Iterator[SummaryWriter]:
    """Open a writer for an evaluation of a run, whose events replace those of earlier calls.

    The events are next to those of the training, in a file of their own, so TensorBoard shows both as one
    run. Their tags begin with the name: ``evaluation_best/mean_reward`` for "evaluation-best".

    Args:
        folder: folder of the run.
        name: name of the evaluation, which begins with "evaluation".
    """
    suffix = f".{name}"
    assert suffix.startswith(EVALUATION_EVENTS)
    for file in folder.glob(f"{EVENTS}{suffix}"):
        file.unlink()
    with EvaluationWriter(name.replace("-", "_"), folder, suffix) as writer:
        yield writer
