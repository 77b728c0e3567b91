"""An agent that can be asked for a return: what it achieves, and what is said of it."""

import json
import warnings

import numpy as np
import pytest
from scipy import stats
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecMonitor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation import Report, TargetSweep, evaluate
from tests.evaluation.askable import Obedient, Purse
from tests.evaluation.tasks import Lottery, vec
from tests.evaluation.test_report import _text as text


def report(*returns):
    return Report(np.array(returns, np.float64), np.ones(len(returns), np.int64))


def sweep_of(achieved: dict[float, float]):
    return TargetSweep({target: report(value) for target, value in achieved.items()})


@pytest.mark.parametrize("n_envs", [1, 3])
def test_each_target_is_asked_for(n_envs):
    sweep = evaluate(Obedient(), episodes=6, target_returns=[3, 1.5, 2], n_envs=n_envs)
    assert sweep.targets.tolist() == [3, 1.5, 2]
    assert sweep.achieved.tolist() == pytest.approx([3, 1.5, 2])
    assert all(found.episodes == 6 for found in sweep.reports.values())
    assert sweep.spearman == 1
    assert sweep.data_range == (1.0, 3.0)


def test_environments_that_show_the_return_already_are_asked_too():
    env = VecMonitor(ReturnToGo(vec(Purse(), Purse()), 0.0))
    sweep = evaluate(Obedient(), env, 4, target_returns=[2, 3])
    assert sweep.achieved.tolist() == pytest.approx([2, 3])


def test_all_targets_are_asked_for_in_the_same_episodes():
    sweep = evaluate(Obedient(), vec(Gift(), Gift()), 8, target_returns=[3, 1])
    assert (sweep.reports[3].returns == sweep.reports[1].returns).all()
    assert np.ptp(sweep.first.returns) > 0


class Gift(Lottery):
    """Pays at random, whatever is done."""

    def __init__(self):
        super().__init__()
        self.action_space = Purse().action_space


def test_the_score_is_on_the_scale_of_the_data():
    sweep = evaluate(Obedient(), episodes=2, target_returns=[3, 2])
    assert [found.normalized_score for found in sweep.reports.values()] == pytest.approx([100, 50])
    shown = " ".join(text(sweep.table()).split())
    assert "0 is a return of 1, 100 one of 3" in shown
    assert "metadata of test/purse-v0" in shown


def test_an_unknown_agent_is_scored_by_the_table_of_its_environment():
    class Named(Purse):
        spec = type("Spec", (), {"id": "Hopper-v5"})()

    class Idle:
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            return np.zeros((len(observation), 1), np.float32), None

    found = evaluate(Idle(), vec(Named()), 1)
    assert found.normalized_score == pytest.approx(100 * 20.272305 / (3234.3 + 20.272305))
    assert "D4RL" in found.references.source
    assert evaluate(Idle(), vec(Purse()), 1).normalized_score is None


def test_a_target_that_the_data_do_not_hold_is_a_warning_with_their_range():
    with pytest.warns(UserWarning, match=r"target returns 0\.5, 4 lie outside .* return 1 to 3"):
        sweep = evaluate(Obedient(), episodes=1, target_returns=[0.5, 1, 3, 4])
    assert sweep.achieved.tolist() == pytest.approx([0.5, 1, 3, 4])


def test_without_data_there_is_no_warning():
    class Free(Obedient):
        return_range = None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(Free(), episodes=2, target_returns=[4]).data_range is None


@pytest.mark.parametrize("targets", [[], [1, np.nan], [np.inf], [2, 2.0]], ids=str)
def test_what_are_no_targets_is_refused(targets):
    with pytest.raises(ValueError, match=r"target_returns must be finite numbers, each of them once, got"):
        evaluate(Obedient(), episodes=1, target_returns=targets)


# What is made of it


def test_spearman_is_scipys():
    achieved = {1.0: 5.0, 2.0: 4.0, 3.0: 9.0, 4.0: 9.5, 5.0: 9.2}
    expected = stats.spearmanr(list(achieved), list(achieved.values())).statistic
    assert sweep_of(achieved).spearman == pytest.approx(expected)
    assert 0 < expected < 1


@pytest.mark.parametrize("achieved", [{1.0: 5.0}, {1.0: 5.0, 2.0: 5.0}], ids=["one target", "all alike"])
def test_without_ranks_there_is_no_correlation(achieved):
    sweep = sweep_of(achieved)
    assert sweep.spearman is None
    assert "eval/spearman" not in sweep.scalars()
    assert "undefined" in text(sweep.table())
    assert json.loads(sweep.to_json())["spearman"] is None


def test_the_first_target_is_the_one_that_counts():
    sweep = TargetSweep({9.0: report(1, 2), 3.0: report(5, 6)})
    assert sweep.mean == sweep.first.mean == 1.5
    assert sweep.first.scalars().items() <= sweep.scalars().items()


def test_tensorboard_gets_every_target(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        sweep = evaluate(Obedient(), episodes=2, target_returns=[3, 1.5], logger=writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    assert {event.step for event in logged.values()} == {7}
    assert {tag: event.value for tag, event in logged.items()} == pytest.approx(sweep.scalars())
    assert sweep.scalars()["eval/normalized_score"] == pytest.approx(100)
    for target, value in (("3", 3), ("1.5", 1.5)):
        of_target = {tag.rpartition("/")[2] for tag in logged if tag.startswith(f"eval/target_{target}/")}
        assert of_target == {"return_mean", "return_iqm", "ci_low", "ci_high", "normalized_score"}
        assert logged[f"eval/target_{target}/return_mean"].value == pytest.approx(value)


def image(folder):
    (event,) = EventAccumulator(str(folder)).Reload().Images("eval/targets")
    return event


def test_tensorboard_shows_the_picture(tmp_path):
    with SummaryWriter(str(tmp_path / "writer")) as writer:
        evaluate(Obedient(), episodes=2, target_returns=[3, 1.5], logger=writer)
    logger = configure(str(tmp_path / "logger"), ["tensorboard", "csv", "json", "log"])
    evaluate(Obedient(), episodes=2, target_returns=[3, 1.5], logger=logger)
    logger.close()
    for shown in (image(tmp_path / "writer"), image(tmp_path / "logger")):
        assert shown.step == 7
        assert (shown.width, shown.height) == (720, 600)
    assert "eval/targets" not in (tmp_path / "logger/progress.csv").read_text()


def test_nothing_is_drawn_for_a_single_target_or_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(TargetSweep, "figure", lambda self: pytest.fail("drawn"))
    with SummaryWriter(str(tmp_path)) as writer:
        sweep_of({1.0: 5.0}).log(writer, 0)
    sweep_of({1.0: 5.0, 2.0: 6.0}).log(configure(str(tmp_path), ["csv"]), 0)


def test_json_reads_back():
    data = json.loads(evaluate(Obedient(), episodes=2, target_returns=[3, 2]).to_json())
    assert [row["target"] for row in data["targets"]] == [3, 2]
    assert data["targets"][1]["returns"] == pytest.approx([2, 2])
    assert data["data_range"] == [1, 3]
    assert data["targets"][0]["references"]["source"] == "metadata of test/purse-v0"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_written(tmp_path, suffix):
    path = tmp_path / f"sweep.{suffix}"
    evaluate(Obedient(), episodes=2, target_returns=[3, 2, 1]).plot(path)
    assert path.stat().st_size > 1000


def test_the_line_of_the_picture_goes_from_low_to_high_targets():
    (axes,) = sweep_of({3.0: 7.0, 1.0: 5.0, 2.0: 9.0}).figure().axes
    (line,) = (found for found in axes.lines if len(found.get_xdata()) == 3 and found.get_marker() == "o")
    assert line.get_xydata().tolist() == [[1, 5], [2, 9], [3, 7]]


def test_the_picture_of_a_single_target_and_an_unwritable_one(tmp_path):
    sweep = sweep_of({1.0: 5.0})
    sweep.plot(tmp_path / "one.png")
    with pytest.raises(OSError, match="nowhere"):
        sweep.plot(tmp_path / "nowhere" / "one.png")
