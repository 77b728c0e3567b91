"""TensorBoard events of a run: descriptions, layout of charts, texts, and evaluations after the training."""

import json

import pytest
from stable_baselines3.common.logger import Logger, configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from rlxf.training.resumed_logger import LogFiles, LogPosition
from rlxf.training.tensorboard import (
    DESCRIPTIONS,
    described_output,
    evaluation_events,
    resumed_output,
    write_layout,
    write_run_texts,
)
from tests.sources import ROOT

LAYOUT = "custom_scalars__config__"


@pytest.fixture
def logger(tmp_path):
    logger = Logger(str(tmp_path), [described_output(tmp_path)])
    yield logger
    logger.close()


def record(logger, step=1, **values):
    for tag, value in values.items():
        logger.record(tag.replace("__", "/"), value)
    logger.dump(step)


def texts(folder, tag):
    """Return step -> text of a tag."""
    events = EventAccumulator(str(folder)).Reload().Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events}


def layout(folder):
    """Return category -> chart -> chart of the layout in a folder."""
    event = EventAccumulator(str(folder)).Reload().Tensors(LAYOUT)[-1]
    parsed = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    return {category.title: {chart.title: chart for chart in category.chart} for category in parsed.category}


def test_scalars_have_descriptions_and_their_values(logger, tmp_path):
    record(logger, eval__iqm=1.5, unknown__tag=2.5)
    record(logger, step=2, eval__iqm=3.5)
    run = EventMultiplexer().AddRun(str(tmp_path), "run").Reload()
    assert run.SummaryMetadata("run", "eval/iqm").summary_description == DESCRIPTIONS["eval/iqm"]
    assert run.SummaryMetadata("run", "unknown/tag").summary_description == ""
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/iqm")] == [(1, 1.5), (2, 3.5)]
    assert [event.value for event in events.Scalars("unknown/tag")] == [2.5]


def test_described_tags_are_those_of_the_reference():
    page = (ROOT / "docs/reference/tensorboard.md").read_text()
    names = {name for line in page.splitlines() if line.startswith("| `") for name in line.split("`")[1::2]}
    names |= {f"{group}/{name}" for group in ("train", "eval", "rollout", "validation") for name in names}
    assert DESCRIPTIONS.keys() <= names


def test_layout_has_the_interval_and_the_losses(logger, tmp_path):
    write_layout(logger, ["train/loss", "validation/loss"], targets=True)
    charts = layout(tmp_path)
    assert list(charts) == ["Evaluation", "Training", "Losses"]
    interval, targets = charts["Evaluation"].values()
    (series,) = interval.margin.series
    assert (series.value, series.lower, series.upper) == ("eval/mean_reward", "eval/ci_low", "eval/ci_high")
    assert list(targets.multiline.tag) == [r"eval/target_.*/return_mean$"]
    assert list(charts["Losses"]) == ["train/loss", "validation/loss"]
    (only,) = charts["Training"].values()
    assert list(only.multiline.tag) == ["rollout/ep_rew_mean$"]


def test_texts_contain_command_and_configuration(logger, tmp_path):
    hostile = "a|b`c` <script>x</script>\n| d | [e](f)"
    write_run_texts(logger, f"rlxf train gtrxl --run '{hostile}'", {"env": hostile, "sizes": [1, 2]}, 5)
    command, configuration = texts(tmp_path, "run/command"), texts(tmp_path, "run/configuration")
    assert all(line.startswith("    ") for line in command[5].splitlines())
    assert command[5].replace("\n    ", "\n").strip() == f"rlxf train gtrxl --run '{hostile}'"
    lines = configuration[5].splitlines()
    assert lines[:2] == ["| option | value |", "|---|---|"]
    assert [line.count("|") for line in lines] == [3] * 4
    assert not set("`<>[]") & set("".join(lines))


def test_a_run_without_a_command_has_its_configuration_only(logger, tmp_path):
    write_run_texts(logger, "", {"env": "CartPole-v1"}, 0)
    assert texts(tmp_path, "run/configuration")
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert not [tag for tag in tags if tag.startswith("run/command")]


def test_loggers_without_tensorboard_are_unchanged(tmp_path):
    logger = configure(str(tmp_path), ["json"])
    write_layout(logger, ["train/loss"])
    write_run_texts(logger, "rlxf", {"env": "CartPole-v1"}, 0)
    record(logger, value=1.0)
    logger.close()
    assert json.loads((tmp_path / "progress.json").read_text()) == {"value": 1.0}
    assert [file.name for file in tmp_path.iterdir()] == ["progress.json"]


def test_evaluations_replace_only_their_own_events(logger, tmp_path):
    record(logger, eval__mean_reward=1.0)
    for value in (5.0, 6.0):
        for name in ("evaluation", "evaluation-best"):
            with evaluation_events(tmp_path, name) as writer:
                writer.add_scalar("eval/mean_reward", value, 9)
                writer.add_text("eval/target_table", "text", 9)
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, expected in (
        ("eval/mean_reward", [(1, 1.0)]),
        ("evaluation/mean_reward", [(9, 6.0)]),
        ("evaluation_best/mean_reward", [(9, 6.0)]),
    ):
        assert [(event.step, event.value) for event in events.Scalars(tag)] == expected
    assert texts(tmp_path, "evaluation_best/target_table") == {9: "text"}
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_resumed_log_keeps_evaluations_and_no_later_events(logger, tmp_path):
    record(logger, value=1.0)
    position = LogPosition.from_json(LogFiles(tmp_path).state())
    record(logger, step=2, value=2.0)
    with evaluation_events(tmp_path, "evaluation") as writer:
        writer.add_scalar("eval/mean_reward", 5.0, 1)
    assert len(LogFiles(tmp_path).state()["events"]) == 1
    resumed_output(tmp_path, position, 1).close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("value")] == [1]
    assert [event.step for event in events.Scalars("evaluation/mean_reward")] == [1]
