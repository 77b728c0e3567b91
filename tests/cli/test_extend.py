"""Tests of ``rlxf resume`` with a new total: longer training of complete and interrupted runs."""

import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.mlp import BehaviorCloning
from rlxf.cli import main
from rlxf.training import RunFolder, read_archive
from rlxf.training.strict_json import load_json
from rlxf.utils.run_files import COMPLETED as MARKER
from tests.cli.running import death_expected, die, refused
from tests.cli.test_resume import rows, scalars
from tests.cli.test_resume_gtrxl import lines
from tests.datasets import ID, record_cartpole

pytestmark = pytest.mark.usefixtures("in_foreground")

COMMON = "--no-progress-bar --checkpoint-seconds 0 --episodes 2 --evaluation-episodes 2"
ONLINE = shlex.split(
    f"train gtrxl --env CartPole-v1 {COMMON} --n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16"
    " --n-epochs 2 --normalize-observations --no-videos --core.width 8 --core.layers 1 --core.memory.length 8"
)
OFFLINE = f"--dataset {ID} {COMMON} --batch-size 4 --log-interval 2"
DT = shlex.split(f"train dt {OFFLINE} --context-length 4 --core.width 8 --core.layers 1 --core.dropout 0.2")
BC = shlex.split(f"train bc {OFFLINE} --hidden-sizes 8 --dropout 0.2")
RVS = shlex.split(f"train rvs {OFFLINE} --hidden-sizes 8")
DECAYING = ["--learning-rate", "linear:0.01:0.001"]
CASES = {
    "gtrxl": (ONLINE, "--total-timesteps", 32, GTrXLPPO),
    "dt": (DT, "--updates", 1, DecisionTransformer),
    "bc": (BC, "--updates", 1, BehaviorCloning),
}
"""Name -> words of a training, option of its total, steps per update of the weights, and agent."""
CONSTANT = {
    "gtrxl": shlex.split("--learning-rate 0.001 --ent-coef 0.01 --evaluate-every 64"),
    "dt": shlex.split("--learning-rate 0.001 --warmup-updates 2 --evaluate-every 2"),
    "bc": shlex.split("--evaluate-every 2"),
}


@pytest.fixture(autouse=True)
def data(minari_root):
    record_cartpole(range(1, 13))


@pytest.fixture
def before_update(monkeypatch):
    """Function that calls an action once, before the update with a number from 1."""

    def arrange(agent, number, action):
        train, actions = agent.train, [action]

        def watched(self, *args):
            done = self.iterations if agent is GTrXLPPO else self._n_updates + 1
            if done == number and actions:
                actions.pop()()
            train(self, *args)

        monkeypatch.setattr(agent, "train", watched)

    return arrange


def run_training(words, option, total, run, *more):
    main([*words, option, str(total), "--run", run, *more])


def extend(run, option, total):
    main(["resume", run, option, str(total), "--no-progress-bar"])


def content(run):
    """Return the content of all files of a run by name."""
    return {str(path): path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def metrics(run):
    """Return the log without the memory of GTrXL, which is also measured at the end of each total."""
    table = [{key: value for key, value in row.items() if "memory/" not in key} for row in lines(Path(run))]
    return table, {tag: values for tag, values in scalars(run).items() if "memory/" not in tag}


def assert_same_runs(one, other, names=("checkpoint.zip", "best.zip", "config.json", "completed.json")):
    for name in names:
        assert Path(one, name).read_bytes() == Path(other, name).read_bytes(), name
    assert metrics(one) == metrics(other)


def test_a_complete_run_is_extended(capsys):
    run_training(BC, "--updates", 4, "run")
    extend("run", "--updates", 6)
    assert BehaviorCloning.load("run/checkpoint.zip", device="cpu").num_timesteps == 6
    assert RunFolder.open("run").completion.steps == 6
    assert load_json(Path("run/config.json").read_bytes())["updates"] == 6
    capsys.readouterr()
    before = content("run")
    for more in ([], ["--updates", "6"]):
        main(["resume", "run", *more])
        assert "run is complete: 6 updates" in capsys.readouterr().out
    assert content("run") == before


def test_a_total_is_accepted_again_although_whole_rollouts_exceed_it(capsys):
    run_training(ONLINE, "--total-timesteps", 40, "run")
    assert RunFolder.open("run").completion.steps == 64
    capsys.readouterr()
    main(["resume", "run", "--total-timesteps", "40"])
    assert "run is complete: 64 steps" in capsys.readouterr().out
    assert "has made 64 steps, got --total-timesteps 41" in refused(
        capsys, "resume", "run", "--total-timesteps", "41"
    )


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_an_extended_run_equals_a_longer_one_with_constant_schedules(name):
    words, option, step, _ = CASES[name]
    run_training(words, option, 4 * step, "run", *CONSTANT[name])
    extend("run", option, 7 * step)
    run_training(words, option, 7 * step, "longer", *CONSTANT[name])
    assert_same_runs("run", "longer", ["checkpoint.zip", "config.json"])
    best, other = (read_archive(Path(run, "best.zip")).tensors for run in ("run", "longer"))
    assert all((best["policy"][name] == x).all() for name, x in other["policy"].items())


def learning_rates(run):
    return [float(row["train/learning_rate"]) for row in rows(Path(run)) if "train/learning_rate" in row]


def test_decaying_schedules_are_computed_from_the_new_total():
    run_training(BC, "--updates", 4, "run", *DECAYING, "--log-interval", "1")
    extend("run", "--updates", 8)
    old, new = [0, 1 / 4, 2 / 4, 3 / 4], [4 / 8, 5 / 8, 6 / 8, 7 / 8]
    assert learning_rates("run") == pytest.approx([0.01 - 0.009 * progress for progress in [*old, *new]])


@pytest.mark.thorough
def test_decaying_schedules_of_gtrxl_are_computed_from_the_new_total():
    """The learning rate of an update is that after its rollout, and is logged after the next rollout."""
    run_training(ONLINE, "--total-timesteps", 4 * 32, "run", *DECAYING)
    extend("run", "--total-timesteps", 7 * 32)
    found = list(dict.fromkeys(learning_rates("run")))
    assert found == pytest.approx([0.01 - 0.009 * done for done in (1 / 4, 2 / 4, 3 / 4, 1, 5 / 7, 6 / 7)])


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "interrupted"])
@pytest.mark.parametrize("name", CASES)
def test_an_extended_run_that_is_killed_ends_like_an_unkilled_one(name, complete, before_update):
    words, option, step, agent = CASES[name]
    if complete:
        run_training(words, option, 4 * step, "run", *DECAYING)
    else:
        before_update(agent, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            run_training(words, option, 4 * step, "run", *DECAYING)
    shutil.copytree("run", "cut")
    extend("run", option, 8 * step)
    before_update(agent, 6, die)
    with death_expected():
        extend("cut", option, 8 * step)
    assert not Path("cut/completed.json").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs("run", "cut")


@pytest.mark.parametrize("moment", ["before the marker is removed", "after it"])
def test_a_kill_while_the_total_is_written_is_harmless(moment, monkeypatch):
    run_training(BC, "--updates", 4, "run", *DECAYING)
    shutil.copytree("run", "cut")
    extend("run", "--updates", 6)
    with monkeypatch.context() as patch:
        if moment == "before the marker is removed":
            unlink = Path.unlink
            patch.setattr(
                Path, "unlink", lambda self, **kw: die() if self.name == MARKER else unlink(self, **kw)
            )
        else:
            patch.setattr("rlxf.training.run_folder.sync_folder", lambda path: die())
        with pytest.raises(SystemError):
            extend("cut", "--updates", 6)
    assert load_json(Path("cut/config.json").read_bytes())["updates"] == 6
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs("run", "cut")


def test_an_interrupted_run_can_be_shortened(before_update):
    before_update(BehaviorCloning, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        run_training(BC, "--updates", 9, "run")
    extend("run", "--updates", 3)
    assert RunFolder.open("run").completion.steps == 3


def test_totals_below_the_progress_are_refused(before_update, capsys):
    run_training(BC, "--updates", 4, "run")
    run_training(ONLINE, "--total-timesteps", 40, "online")
    before = content("run") | content("online")
    message = refused(capsys, "resume", "run", "--updates", "3")
    assert "run has made 4 updates, got --updates 3: give a larger total, or start a new run" in message
    assert "online has made 64 steps, got --total-timesteps 63" in refused(
        capsys, "resume", "online", "--total-timesteps", "63"
    )
    assert content("run") | content("online") == before


def test_the_option_of_another_agent_is_refused(capsys):
    run_training(BC, "--updates", 4, "run")
    message = refused(capsys, "resume", "run", "--total-timesteps", "9")
    assert (
        "--total-timesteps does not apply to run, a run of agent 'behavior_cloning': use --updates" in message
    )


def test_a_failed_extension_does_not_change_the_run(capsys):
    run_training(BC, "--updates", 4, "run")
    shutil.rmtree(os.environ["MINARI_DATASETS_PATH"])
    before = content("run")
    refused(capsys, "resume", "run", "--updates", "9")
    assert content("run") == before


def test_an_extension_on_other_data_of_the_same_id_does_not_change_the_run(capsys):
    run_training(BC, "--updates", 4, "run")
    shutil.rmtree(Path(os.environ["MINARI_DATASETS_PATH"], *ID.split("/")))
    record_cartpole(range(5, 17))
    before = content("run")
    assert "its fingerprint of the data is" in refused(capsys, "resume", "run", "--updates", "9")
    assert content("run") == before


def test_an_interrupted_extension_has_no_evaluation_of_other_weights(before_update, capsys):
    run_training(BC, "--updates", 4, "run")
    before_update(BehaviorCloning, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        main(["resume", "run", "--updates", "9"])
    main(["pack", "run", "packed"])
    assert "The agent was not evaluated" in Path("packed/README.md").read_text()
    assert not Path("packed/evaluation.json").exists()
    main(["resume", "run"])
    main(["pack", "run", "complete"])
    assert "The agent was not evaluated" not in Path("complete/README.md").read_text()


def test_a_run_without_checkpoints_cannot_be_extended(capsys):
    run_training(BC, "--updates", 4, "run")
    shutil.rmtree("run/checkpoints")
    before = content("run")
    message = refused(capsys, "resume", "run", "--updates", "9")
    assert "run has weights, but no training state in run/checkpoints" in message
    assert "begin a new run with rlxf train bc --config run --run NEW" in message
    assert content("run") == before
