"""``--curriculum``: training in easier tasks first, its files, its resumption, and what needs trust."""

import json
import shutil
from pathlib import Path

import pytest

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.options import trust_option
from rlxf.training import RunFolder
from tests.cli.running import TINY, change_config, refused, train
from tests.cli.test_resume import die, rows

STAGES = {"stages": [{"corridor_length": 1}, {"corridor_length": 2}], "advance_return": -9.0, "episodes": 2}
CURRICULUM = ["--curriculum", json.dumps(STAGES)]
LONGER = ["--total-timesteps", "192", "--checkpoint-seconds", "0"]


def stages_of(run):
    return [float(row["curriculum/stage"]) for row in rows(Path(run)) if row.get("curriculum/stage")]


def test_a_killed_run_continues_in_its_stage(monkeypatch):
    slow = ["--curriculum", json.dumps(STAGES | {"episodes": 8})]
    train("--run", "whole", *slow, *LONGER)
    stages = stages_of("whole")
    assert 1 < stages[1] < 3 == stages[-1]
    learn = GTrXLPPO.train

    def killed(self):
        if self.iterations == 2:
            die()
        learn(self)

    with monkeypatch.context() as patch:
        patch.setattr(GTrXLPPO, "train", killed)
        patch.setattr("rlxf.cli.training_session.save_agent", lambda *_: None)
        with pytest.raises(SystemError):
            train("--run", "cut", *slow, *LONGER)
    main(["resume", "cut", "--no-progress-bar"])
    assert stages_of("cut") == stages
    whole, cut = (Path(name, "checkpoint.zip").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_evaluations_are_in_the_task_itself(monkeypatch):
    lengths = []
    monkeypatch.setattr(
        "rlxf.envs.tmaze_vector.TMazeVector.__init__",
        _recording(lengths),
    )
    train("--run", "run", *CURRICULUM, "--evaluate-every", "32", "--evaluation-episodes", "2")
    assert lengths
    assert set(lengths) == {3}
    assert RunFolder.open("run").config["curriculum"] == STAGES


def _recording(lengths):
    from rlxf.envs.tmaze_vector import TMazeVector

    init = TMazeVector.__init__

    def recorded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        lengths.append(kwargs["corridor_length"])

    return recorded


def test_a_settings_file_has_a_curriculum_that_another_environment_drops():
    Path("task.toml").write_text(
        'env = "rlxf/TMaze-v0"\n[env_kwargs]\ncorridor_length = 3\n[curriculum]\nadvance_return = -9.0\n'
        "episodes = 2\nstages = [{corridor_length = 1}, {corridor_length = 2}]\n"
    )
    main(["train", "gtrxl", "--config", "task.toml", "--run", "first", *TINY])
    main(["train", "gtrxl", "--config", "first", "--run", "second", "--seed", "1"])
    main(["train", "gtrxl", "--config", "first", "--run", "other", "--env", "CartPole-v1"])
    configs = [RunFolder.open(name).config["curriculum"] for name in ("first", "second", "other")]
    assert configs == [STAGES, STAGES, {}]


def test_a_run_of_an_earlier_version_has_no_curriculum(capsys):
    train("--run", "run")
    change_config(Path("run"), curriculum=None)
    shutil.rmtree("run/resume", ignore_errors=True)
    main(["resume", "run", "--no-progress-bar"])
    assert "run is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ([], "--curriculum must be a JSON object, got []"),
        ({"stages": [{}]}, "--curriculum needs stages and advance_return, advance_return is missing"),
        ({"levels": 1}, "--curriculum has stages, advance_return, episodes, got levels"),
        ({"stages": 3, "advance_return": 0}, "the stages of a curriculum must be a list, got 3"),
        ({"stages": ["CartPole-v1"], "advance_return": 0}, "all stages of a curriculum need the same spaces"),
        ({"stages": [{"length": 3}], "advance_return": 0}, "takes no argument 'length'"),
    ],
    ids=str,
)
def test_what_is_no_curriculum_is_refused(curriculum, message, capsys):
    task = ["--env", "rlxf/TMaze-v0", *TINY]
    assert message in refused(capsys, "train", "gtrxl", *task, "--curriculum", json.dumps(curriculum))
    assert message in refused(
        capsys, "baseline", "ppo", *task[:2], "--total-timesteps", "9", "--curriculum", json.dumps(curriculum)
    )


@pytest.mark.parametrize("stage", ["my_tasks:my/Maze-v0", {"file": "secret"}, "my/Unknown-v0"], ids=str)
def test_stages_of_a_strangers_run_need_trust(stage, capsys):
    train("--run", "run", *CURRICULUM)
    change_config(Path("run"), curriculum=STAGES | {"stages": [stage]}, total_timesteps=128)
    shutil.rmtree("run/completion.json", ignore_errors=True)
    config = RunFolder.open("run").config
    assert trust_option(config) == " --trust"
    capsys.readouterr()
    for command in (["resume", "run", "--total-timesteps", "192"], ["train", "gtrxl", "--config", "run"]):
        message = refused(capsys, *command, "--no-progress-bar")
        assert "trust" in message or "unknown" in message, message
    main(["evaluate", "run", "--episodes", "2", "--no-progress-bar"])  # without the curriculum


def test_a_baseline_has_a_curriculum_and_random_actions_have_none(capsys):
    task = ["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}', *CURRICULUM]
    short = ["--total-timesteps", "128", "--episodes", "2", "--evaluation-episodes", "2"]
    small = ["--arguments", '{"n_steps": 64, "batch_size": 64, "n_epochs": 1}']
    main(["baseline", "ppo", *task, *short, *small, "--run", "ppo"])
    assert stages_of("ppo")[-1] == 3
    message = refused(capsys, "baseline", "random", *task, *short, "--run", "random")
    assert "random actions have no --curriculum; leave it out" in message
