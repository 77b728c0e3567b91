"""``--curriculum``: training in easier tasks first, its files, its resumption, and what needs trust."""

import json
import sys
from pathlib import Path

import gymnasium
import pytest

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.env_options import resume_trust_option, trust_option
from rlxf.cli.job_options import check_same, needs_trust
from rlxf.experiments.jobs import Job, Outcome
from rlxf.training import RunFolder
from tests.cli.running import TASK, TINY, change_config, die, refused, train
from tests.cli.test_resume import rows

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
    assert lengths == [3, 3]  # during and after the training, both in the vector form of the task
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


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ([], "--curriculum must be a JSON object, got []"),
        ({"stages": [{}]}, "a curriculum needs stages and advance_return, got no advance_return"),
        ({"levels": 1}, "a curriculum has stages, advance_return, episodes, got 'levels'"),
        ({"stages": [{}], "advance_return": 10**400}, "advance_return must be a finite number, got 1000"),
        (
            {"stages": [{}], "advance_return": 0, "episodes": 10**30},
            "episodes must be a whole number from 1 to",
        ),
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


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Module that registers an environment, and notes its import in a file."""
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium, pathlib\npathlib.Path('imported').touch()\n"
        "gymnasium.register('my/Maze-v0', entry_point='rlxf.envs.tmaze:TMaze')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    gymnasium.registry.pop("my/Maze-v0", None)
    sys.modules.pop("my_tasks", None)


def interrupted_run(stage):
    """Return a run that is not complete, whose config.json has another first stage."""
    train("--run", "run", *CURRICULUM)
    change_config(Path("run"), curriculum=STAGES | {"stages": [stage]}, total_timesteps=128)
    Path("run/completed.json").unlink()
    return RunFolder.open("run")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("my_tasks:my/Maze-v0", "a module that a file names is not imported"),
        ({"file": "secret"}, "stage 1 of the curriculum in the file is 'rlxf/TMaze-v0' with file='secret'"),
        ("my/Unknown-v0", "my/Unknown-v0"),
    ],
    ids=str,
)
def test_stages_of_a_strangers_run_need_trust(module, stage, message, capsys):
    run = interrupted_run(stage)
    assert resume_trust_option(run.config) == " --trust"
    assert trust_option(run.config) == ""
    for command in (["resume", "run"], ["train", "gtrxl", "--config", "run", "--run", "new"]):
        assert message in refused(capsys, *command, "--no-progress-bar")
    main(["evaluate", "run", "--episodes", "2", "--no-progress-bar"])  # acts in the task itself
    assert not Path("imported").exists()
    own = ["--curriculum", json.dumps(STAGES)]
    main(["train", "gtrxl", "--config", "run", "--run", "own", *own])
    assert not Path("imported").exists()


def test_a_trusted_run_imports_the_module_of_a_stage(module):
    interrupted_run("my_tasks:my/Maze-v0")
    main(["resume", "run", "--no-progress-bar", "--trust"])
    assert Path("imported").exists()


@pytest.mark.parametrize(
    "given",
    [
        TASK[:2],
        [*TASK[:2], "--env-kwargs", '{"corridor_length": 4}'],
        ["--env-kwargs", '{"corridor_length": 4}'],
        ["--curriculum", "{}"],
    ],
    ids=str,
)
def test_options_override_the_task_of_a_run(given):
    train("--run", "run", *CURRICULUM)
    main(["train", "gtrxl", "--config", "run", "--run", "new", *given])
    config = RunFolder.open("new").config
    assert config["env"] == "rlxf/TMaze-v0"
    assert config["curriculum"] == ({} if "--curriculum" in given else STAGES)


def test_the_module_of_an_environment_that_the_user_names_is_imported(module):
    stages = json.dumps(STAGES | {"stages": ["rlxf/TMaze-v0"]})
    named = ["--env", "my_tasks:my/Maze-v0"]
    main(["train", "gtrxl", *named, "--curriculum", stages, *TINY, "--run", "run"])
    main(["train", "gtrxl", *named, "--config", "run", "--run", "new"])
    assert RunFolder.open("new").config["curriculum"]["stages"] == ["rlxf/TMaze-v0"]


def test_a_run_of_an_experiment_with_another_curriculum_is_not_resumed():
    train("--run", "run", *CURRICULUM)
    settings = RunFolder.open("run").config
    words = [*TASK, "--curriculum", json.dumps(settings["curriculum"])]
    job = Job("run", "train gtrxl", tuple(words), trusted=True)
    Outcome(["train gtrxl", *words], 0).write(job)
    given = {name: settings[name] for name in ("env", "env_kwargs", "curriculum")}
    check_same(job, given, Path("file.toml"))
    change_config(Path("run"), curriculum=STAGES | {"stages": ["evil:Stage-v0"]})
    with pytest.raises(ValueError, match=r"run has curriculum = .*evil.* in its config.json"):
        check_same(job, given, Path("file.toml"))
    change_config(Path("run"), curriculum=None, env_kwargs={"corridor_length": 9})
    with pytest.raises(ValueError, match=r"run has env_kwargs = .*9.* in its config.json"):
        check_same(job, {"env": settings["env"], "env_kwargs": {}}, Path("file.toml"))


def test_jobs_with_a_curriculum_are_resumed_with_trust():
    assert needs_trust({"env": "CartPole-v1", "curriculum": STAGES})
    assert not needs_trust({"env": "CartPole-v1", "curriculum": {}})


def test_a_baseline_has_a_curriculum_and_random_actions_have_none(capsys):
    task = ["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 3}', *CURRICULUM]
    short = ["--total-timesteps", "128", "--episodes", "2", "--evaluation-episodes", "2"]
    small = ["--arguments", '{"n_steps": 64, "batch_size": 64, "n_epochs": 1}']
    main(["baseline", "ppo", *task, *short, *small, "--run", "ppo"])
    assert stages_of("ppo")[-1] == 3
    message = refused(capsys, "baseline", "random", *task, *short, "--run", "random")
    assert "random actions have no --curriculum; leave it out" in message
