"""Tests of the progress display and of evaluations during training."""

import io
import json
import os
import re
import shlex
import signal
from functools import partial
from pathlib import Path

import pytest
from rich.live import Live
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.cli import main, output, progress
from rlxf.cli.evaluated_training import default_interval
from rlxf.cli.output import PipeSafeConsole, exit_with
from rlxf.cli.progress import LineDisplay, PanelDisplay, ProgressState
from rlxf.evaluation import EvaluationCallback, periodic
from tests.cli.running import refused, train
from tests.datasets import ID, record_cartpole

SHOWN = ["--progress-bar", "--evaluation-episodes", "2"]
OFFLINE = shlex.split(
    f"train dt --dataset {ID} --updates 4 --log-interval 1 --episodes 2 --evaluation-episodes 2"
    " --context-length 4 --batch-size 4 --core.width 8 --core.layers 1 --run run"
)


@pytest.fixture(autouse=True)
def at_each_step(monkeypatch):
    """Show progress at each step instead of every few seconds."""
    monkeypatch.setattr(LineDisplay, "every_seconds", 0.0)


@pytest.fixture
def data(minari_root):
    record_cartpole()


def lines(text):
    return [line for line in text.splitlines() if re.match("(steps|updates) [0-9,]+/", line)]


# Progress display


def test_progress_of_an_online_training(capsys):
    train("--run", "run", "--total-timesteps", "70", *SHOWN, "--evaluate-every", "None")
    found = lines(capsys.readouterr().out)
    assert [line.split()[1] for line in found[:2]] == ["2/96", "4/96"], "whole rollouts of 32 steps"
    steps = [line.split()[1] for line in found]
    assert len(set(steps)) == len(steps), "each step has one line"
    assert found[-1].startswith("steps 96/96 | return ")
    for part in (" | success ", "% | explained variance ", " | entropy ", " steps/s | 0:00:00 left | "):
        assert part in found[-1]
    # the last evaluation is at the given total, because the rest of the rollout has the same weights
    assert re.search(r"evaluation at step 70: return \S+; best return \S+ at step (32|64|70)$", found[-1])


def test_a_single_rollout_shows_its_update_without_repeated_lines(capsys):
    """SB3 logs the metrics of an update with the next rollout, which does not exist here."""
    train("--run", "run", "--total-timesteps", "32", *SHOWN, "--evaluate-every", "0")
    found = lines(capsys.readouterr().out)
    for part in (" | explained variance ", " | entropy "):
        assert part in found[-1]
    contents = [re.sub(r"\| [0-9,.]+ steps/s \| \S+ left", "", line) for line in found]
    assert len(set(contents)) == len(contents)


@pytest.mark.thorough
def test_progress_of_an_offline_training(data, capsys):
    main([*OFFLINE, "--target-returns", "9", "3", "--evaluate-every", "1"])
    found = lines(capsys.readouterr().out)
    assert found[-1].startswith("updates 4/4 | loss ")
    returns = r"target 9, return \S+; target 3, return \S+; best return \S+"
    assert re.search(rf"evaluation at update 4: {returns} at update [1-4]$", found[-1])


def test_each_step_has_one_line_if_the_training_is_stopped(data, capsys, monkeypatch):
    step = progress.Progress._on_step

    def stop(self):
        if self.num_timesteps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(progress.Progress, "_on_step", stop)
    with pytest.raises(SystemExit) as exit_info:
        main([*OFFLINE, "--evaluate-every", "1"])
    assert exit_info.value.code == 75
    assert [line.split()[1] for line in lines(capsys.readouterr().out)] == ["1/4", "2/4"]


def test_progress_of_pretraining_and_distillation(data, capsys):
    sizes = shlex.split("--context-length 4 --batch-size 4 --core.width 8 --core.layers 1 --log-interval 1")
    main(["pretrain", "--dataset", ID, "--updates", "2", "--run", "pre", *sizes])
    assert lines(capsys.readouterr().out)[-1].startswith("updates 2/2 | loss ")
    train("--run", "teacher")
    main(["distill", "teacher", "--steps", "32", "--run", "student"])
    assert re.match("steps 32/32 \\| return ", lines(capsys.readouterr().out)[-1])


@pytest.mark.parametrize("quiet", [["--quiet"], ["--no-progress-bar"]])
def test_progress_can_be_turned_off(quiet, capsys):
    train("--run", "run", *SHOWN, "--evaluate-every", "32", *quiet)
    shown = capsys.readouterr().out
    assert not lines(shown)
    assert ("total_timesteps" in shown) is ("--quiet" not in quiet)
    assert "Evaluation over 3 episodes" in shown
    assert "best evaluation during training: mean return " in shown


def test_panel_is_redrawn_in_place():
    shown = io.StringIO()
    terminal = PipeSafeConsole(file=shown, force_terminal=True, width=120)
    figures = ["return 0.5"]
    with Live(console=terminal, auto_refresh=False) as live:
        for done in (10, 20):
            PanelDisplay(live).show(
                ProgressState("steps", done, 40, 10.0, figures, "evaluation at step 10: return 0.4")
            )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "steps 20/40" in plain
    assert "10 steps/s 0:00:02 left" in plain
    assert "return 0.5" in plain
    assert "\x1b[1A" in shown.getvalue(), "the cursor should move up"


def test_other_output_is_printed_above_the_block(capsys):
    """Rich clears the block, prints the text, and draws the block again below."""
    with output.live_block() as live:
        live.console.file = io.StringIO()
        output.print_out("a line")
        assert live.console.file.getvalue() == "a line\n"
    output.print_out("afterwards")
    assert capsys.readouterr().out == "afterwards\n"


def test_the_last_message_stands_below_the_block(monkeypatch):
    """On a terminal, the block is drawn a last time before the message, and not again afterwards."""
    shown = io.StringIO()
    terminal = partial(PipeSafeConsole, file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(output, "PipeSafeConsole", terminal)

    def stop():
        with output.live_block() as live:
            PanelDisplay(live).show(ProgressState("steps", 10, 40, 10.0))
            exit_with("stopped by SIGINT; resume with: rlxf resume run", 75)

    with pytest.raises(SystemExit):
        stop()
    before, message, after = shown.getvalue().partition("resume with")
    assert message
    assert "steps 10/40" in before
    assert "steps 10/40" not in after


class Clock:
    """Fake clock for progress and evaluations."""

    now = 0.0

    def monotonic(self):
        return self.now


class Evaluations(EvaluationCallback):
    """Evaluations of 100 seconds without episodes."""

    def __init__(self, clock):
        super().__init__("CartPole-v1", every_steps=10)
        self.clock = clock

    def on_interval(self):
        self.clock.now += 100.0
        return 0


class Shown(LineDisplay):
    """Display that keeps all states."""

    def __init__(self):
        self.states = []

    def show(self, state):
        self.states.append(state)


def test_the_rate_and_the_remaining_time_do_not_include_evaluations(monkeypatch):
    """A step takes a second: 40 steps take 40 seconds, and 4 evaluations take 400."""
    clock, shown = Clock(), Shown()
    monkeypatch.setattr(periodic, "time", clock)
    monkeypatch.setattr(progress, "time", clock)

    class Second(BaseCallback):
        def _on_step(self):
            clock.now += 1.0
            return True

    evaluations = Evaluations(clock)
    display = progress.Progress(shown, "steps", 40, {}, [evaluations])
    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=20, batch_size=20, n_epochs=1, device="cpu")
    agent.learn(40, [Second(), evaluations, display])
    states = {state.done: state for state in shown.states}
    assert {state.per_second for state in shown.states} == {1.0}
    assert states[20].remaining == "0:00:20 left"
    took = [states[done].evaluating for done in (1, 20, 40)]
    assert took == ["", "evaluations took 0:03:20", "evaluations took 0:06:40"]


def test_lines_are_printed_without_a_terminal(capsys):
    with progress.open_display() as display:
        assert isinstance(display, LineDisplay)


def test_progress_does_not_affect_training(tmp_path):
    train("--run", "shown", *SHOWN)
    train("--run", "silent", "--quiet")
    assert (tmp_path / "shown/checkpoint.zip").read_bytes() == (
        tmp_path / "silent/checkpoint.zip"
    ).read_bytes()


# Interval of evaluations, and best checkpoints


def test_default_interval_is_a_tenth_of_the_training():
    assert default_interval(200_000, least=2_048) == 20_000
    assert default_interval(200_001) == 20_001
    assert default_interval(5_000, least=2_048) == 2_048


def test_evaluations_do_not_affect_training(tmp_path, data):
    for run, every in (("with", "32"), ("without", "0")):
        train("--run", run, "--normalize-observations", "--evaluate-every", every)
        offline = [*OFFLINE[:-1], f"offline-{run}", "--core.dropout", "0.2", "--evaluate-every", every[0]]
        main([*offline, "--quiet"])
    for start in ("", "offline-"):
        one, other = (tmp_path / f"{start}{run}/checkpoint.zip" for run in ("with", "without"))
        assert one.read_bytes() == other.read_bytes()


def test_the_best_checkpoint_is_saved_by_default(capsys, data):
    train("--run", "run", "--evaluate-every", "None", "--normalize-observations")
    output = capsys.readouterr().out
    best = GTrXLPPO.load("run/best.zip", device="cpu")
    assert best.num_timesteps in (32, 64)
    assert f"at step {best.num_timesteps}, saved in run/best.zip\n" in output
    assert Path("run/best-normalizer.zip").is_file()
    assert json.loads(Path("run/config.json").read_text())["evaluate_every"] is None
    main([*OFFLINE[:-1], "offline", "--quiet"])
    best = DecisionTransformer.load("offline/best.zip", device="cpu")
    assert f"at update {best.num_timesteps}, saved in offline/best.zip\n" in capsys.readouterr().out


def test_no_best_checkpoint_without_evaluations(capsys):
    train("--run", "run", "--evaluate-every", "0")
    assert not Path("run/best.zip").exists()
    assert "best" not in capsys.readouterr().out.lower()
    assert "run has no best.zip" in refused(capsys, "evaluate", "run", "--checkpoint", "best")


@pytest.mark.parametrize("requested", ["last", "best", "all"])
def test_either_checkpoint_can_be_evaluated(requested, finished, capsys):
    words = ["evaluate", str(finished), "--episodes", "2", "--no-progress-bar", "--checkpoint", requested]
    main(words)
    shown = capsys.readouterr().out
    best = "Best checkpoint" in shown or "acts like the last one" in shown
    assert ("Last checkpoint" in shown, best) == (requested != "best", requested != "last")


def test_the_best_checkpoint_uses_its_own_normalization(monkeypatch):
    """The running statistics of the training change after the best evaluation."""
    for seed, run in enumerate(("run", "other")):
        cartpole = ["--env", "CartPole-v1", "--env-kwargs", "{}", "--seed", str(seed)]
        train("--run", run, *cartpole, "--normalize-observations")
    Path("run/best.zip").write_bytes(Path("run/checkpoint.zip").read_bytes())
    Path("run/best-normalizer.zip").write_bytes(Path("other/normalizer.zip").read_bytes())
    seen, predict = [], GTrXLPPO.predict

    def watched(self, observation, *rest, **more):
        seen.append(observation.copy())
        return predict(self, observation, *rest, **more)

    monkeypatch.setattr(GTrXLPPO, "predict", watched)
    first = {}
    for which in ("last", "best"):
        seen.clear()
        main(["evaluate", "run", "--episodes", "1", "--no-progress-bar", "--checkpoint", which])
        first[which] = seen[0]
    assert (first["last"] != first["best"]).any()
