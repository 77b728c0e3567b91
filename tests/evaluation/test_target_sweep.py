"""Evaluation of a return-conditioned agent at several targets."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from scipy import stats
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecMonitor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.described_env import DescribedEnv
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation import Report, TargetSweep, evaluate
from rlxf.evaluation.episodes import validate_targets
from tests.evaluation.test_report import rendered
from tests.evaluation.worlds import ActionRewardEnv, Lottery, TargetFollower, vec


def report(*returns):
    return Report(np.array(returns, np.float64), np.ones(len(returns), np.int64))


def sweep_of(achieved: dict[float, float]):
    return TargetSweep({target: report(value) for target, value in achieved.items()})


@pytest.mark.parametrize("n_envs", [1, 3])
def test_each_target_is_evaluated(n_envs):
    sweep = evaluate(TargetFollower(), episodes=6, target_returns=[3, 1.5, 2], n_envs=n_envs)
    assert sweep.targets.tolist() == [3, 1.5, 2]
    assert sweep.achieved.tolist() == pytest.approx([3, 1.5, 2])
    assert all(each.episodes == 6 for each in sweep.reports.values())
    assert sweep.spearman == 1
    assert sweep.data_range == (1.0, 3.0)


def test_environments_in_return_to_go_are_used():
    env = VecMonitor(ReturnToGo(vec(ActionRewardEnv(), ActionRewardEnv()), 0.0))
    sweep = evaluate(TargetFollower(), env, 4, target_returns=[2, 3])
    assert sweep.achieved.tolist() == pytest.approx([2, 3])
    assert env.venv.target_return.tolist() == [0.0, 0.0]


def test_all_targets_use_the_same_episodes():
    sweep = evaluate(TargetFollower(), vec(Gift(), Gift()), 8, target_returns=[3, 1])
    assert (sweep.reports[3].returns == sweep.reports[1].returns).all()
    assert np.ptp(sweep.first.returns) > 0


class Gift(Lottery):
    """Environment with random rewards that do not depend on the action."""

    def __init__(self):
        super().__init__()
        self.action_space = ActionRewardEnv().action_space


def test_score_has_the_reference_scores_of_the_data():
    sweep = evaluate(TargetFollower(), episodes=2, target_returns=[3, 2])
    assert [each.normalized_score for each in sweep.reports.values()] == pytest.approx([100, 50])
    table = " ".join(rendered(sweep.table()).split())
    assert "0 is a return of 1, 100 one of 3" in table
    assert "metadata of test/purse-v0" in table


def test_scores_of_the_data_are_not_used_in_another_environment():
    class Recorded(TargetFollower):
        dataset_info = SimpleNamespace(env=DescribedEnv("Purse-v0"))

    class Other(ActionRewardEnv):
        spec = EnvSpec("Other-v0")

    class Same(ActionRewardEnv):
        spec = EnvSpec("Purse-v0")

    for env, score in ((Same(), 100), (Other(), None)):
        sweep = evaluate(Recorded(), env, 2, target_returns=[3])
        assert [each.normalized_score for each in sweep.reports.values()] == [score]


def test_score_of_other_agents_has_the_reference_scores_of_the_environment():
    class Named(ActionRewardEnv):
        spec = EnvSpec("Hopper-v5")

    class NamedOtherwise(ActionRewardEnv):
        spec = type("Spec", (), {"id": "Hopper-v5"})()

    class Idle:
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            return np.zeros((len(observation), 1), np.float32), None

    result = evaluate(Idle(), vec(Named()), 1)
    assert result.normalized_score == pytest.approx(100 * 20.272305 / (3234.3 + 20.272305))
    assert "D4RL" in result.references.source
    assert evaluate(Idle(), vec(NamedOtherwise()), 2).normalized_score is not None
    assert evaluate(Idle(), vec(ActionRewardEnv()), 1).normalized_score is None


def test_target_outside_the_data_warns_with_their_range():
    with pytest.warns(UserWarning, match=r"target returns 0\.5, 4 are outside .* data, 1 to 3"):
        sweep = evaluate(TargetFollower(), episodes=1, target_returns=[0.5, 1, 3, 4])
    assert sweep.achieved.tolist() == pytest.approx([0.5, 1, 3, 4])


def test_unknown_data_range_does_not_warn():
    class Free(TargetFollower):
        return_range = None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(Free(), episodes=2, target_returns=[4]).data_range is None


def test_a_seed_of_numpy_with_targets():
    """Gymnasium refuses NumPy's integers."""
    env = ActionRewardEnv()
    sweep = evaluate(TargetFollower(), env, 2, target_returns=[3, 2], seed=np.int64(3))
    assert len(sweep.reports) == 2
    with pytest.raises(TypeError, match="float"):
        evaluate(TargetFollower(), env, 2, target_returns=[3], seed=3.9)


@pytest.mark.parametrize("targets", [[], [1, np.nan], [np.inf], [1e40], [2, 2.0]], ids=str)
def test_invalid_targets_raise(targets):
    with pytest.raises(ValueError, match=r"target_returns must be .* finite numbers without duplicates, got"):
        evaluate(TargetFollower(), episodes=1, target_returns=targets)


def test_a_number_as_targets_raises():
    with pytest.raises(TypeError, match=r"must be a sequence of numbers, such as \[60\], got 60"):
        evaluate(TargetFollower(), episodes=2, target_returns=60)


def test_a_conditioned_agent_without_a_target_raises():
    agent = TargetFollower()
    agent.return_conditioned = True
    message = r"TargetFollower is conditioned on a return: pass target_returns, such as \[3\], the largest"
    with pytest.raises(TypeError, match=message):
        evaluate(agent, episodes=2)
    env = ReturnToGo(vec(ActionRewardEnv()), 2)
    assert evaluate(agent, env, episodes=2).mean == 2


# Statistics and outputs of the sweep


def test_spearman_equals_scipy():
    achieved = {1.0: 5.0, 2.0: 4.0, 3.0: 9.0, 4.0: 9.5, 5.0: 9.2}
    expected = stats.spearmanr(list(achieved), list(achieved.values())).statistic
    assert sweep_of(achieved).spearman == pytest.approx(expected)
    assert 0 < expected < 1


@pytest.mark.parametrize("achieved", [{1.0: 5.0}, {1.0: 5.0, 2.0: 6.0}, {1.0: 5.0, 2.0: 5.0, 3.0: 5.0}])
def test_undefined_correlation_is_none(achieved):
    """With fewer than three targets, tables and figures do not mention it."""
    sweep = sweep_of(achieved)
    assert sweep.spearman is None
    assert "eval/spearman" not in sweep.scalars()
    expected = ", Spearman's rank correlation undefined" if len(achieved) > 2 else ""
    assert " ".join(sweep.table().title.split()) == f"Requested and achieved{expected}"
    assert sweep.figure().axes[0].get_title() == expected.removeprefix(", ")
    assert json.loads(sweep.to_json())["spearman"] is None


def test_scalars_are_those_of_the_first_target():
    sweep = TargetSweep({9.0: report(1, 2), 3.0: report(5, 6)})
    assert sweep.mean == sweep.first.mean == 1.5
    assert sweep.first.scalars().items() <= sweep.scalars().items()


def test_tensorboard_has_every_target(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        sweep = evaluate(TargetFollower(), episodes=2, target_returns=[3, 1.5], logger=writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    assert {event.step for event in logged.values()} == {7}
    shown = {tag: value for tag, value in sweep.scalars().items() if tag in logged}
    assert {tag: event.value for tag, event in logged.items()} == pytest.approx(shown)
    assert sweep.first.scalars().keys() <= shown.keys()
    assert sweep.scalars()["eval/normalized_score"] == pytest.approx(100)
    for target, value in (("3", 3), ("1.5", 1.5)):
        of_target = {tag.rpartition("/")[2] for tag in logged if tag.startswith(f"eval/target_{target}/")}
        assert of_target == {"return_mean"}
        assert f"eval/target_{target}/ci_low" in sweep.scalars()
        assert logged[f"eval/target_{target}/return_mean"].value == pytest.approx(value)


def image(folder):
    (event,) = EventAccumulator(str(folder)).Reload().Images("eval/targets")
    return event


def test_tensorboard_has_the_figure(tmp_path):
    with SummaryWriter(str(tmp_path / "writer")) as writer:
        evaluate(TargetFollower(), episodes=2, target_returns=[3, 1.5], logger=writer)
    logger = configure(str(tmp_path / "logger"), ["tensorboard", "csv", "json", "log"])
    evaluate(TargetFollower(), episodes=2, target_returns=[3, 1.5], logger=logger)
    logger.close()
    for event in (image(tmp_path / "writer"), image(tmp_path / "logger")):
        assert event.step == 7
        assert (event.width, event.height) == (720, 600)
    assert "eval/targets" not in (tmp_path / "logger/progress.csv").read_text()


def test_no_figure_for_a_single_target_or_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(TargetSweep, "figure", lambda self: pytest.fail("drawn"))
    with SummaryWriter(str(tmp_path)) as writer:
        sweep_of({1.0: 5.0}).log(writer, 0)
    sweep_of({1.0: 5.0, 2.0: 6.0}).log(configure(str(tmp_path), ["csv"]), 0)


def test_json_round_trip():
    data = json.loads(evaluate(TargetFollower(), episodes=2, target_returns=[3, 2]).to_json())
    assert [row["target"] for row in data["targets"]] == [3, 2]
    assert data["targets"][1]["returns"] == pytest.approx([2, 2])
    assert data["data_range"] == [1, 3]
    assert data["targets"][0]["references"]["source"] == "metadata of test/purse-v0"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_file(tmp_path, suffix):
    path = tmp_path / f"sweep.{suffix}"
    evaluate(TargetFollower(), episodes=2, target_returns=[3, 2, 1]).plot(path)
    assert path.stat().st_size > 1000


def test_figure_has_sorted_targets():
    (axes,) = sweep_of({3.0: 7.0, 1.0: 5.0, 2.0: 9.0}).figure().axes
    (line,) = (each for each in axes.lines if len(each.get_xdata()) == 3 and each.get_marker() == "o")
    assert line.get_xydata().tolist() == [[1, 5], [2, 9], [3, 7]]


@pytest.mark.thorough
def test_plot_of_a_single_target_and_of_an_unwritable_path(tmp_path):
    sweep = sweep_of({1.0: 5.0})
    sweep.plot(tmp_path / "one.png")
    with pytest.raises(OSError, match="nowhere"):
        sweep.plot(tmp_path / "nowhere" / "one.png")


def test_targets_with_the_same_six_digits_keep_their_results():
    targets = [1234567.0, 1234568.0, 20.0]
    sweep = TargetSweep({target: Report(np.full(2, target), np.ones(2)) for target in targets})
    assert list(sweep.labels.values()) == ["1234567.0", "1234568.0", "20"]
    means = {tag: value for tag, value in sweep.scalars().items() if tag.endswith("/return_mean")}
    assert list(means.values()) == targets
    assert len(sweep.markdown().splitlines()) == 2 + len(targets)


def test_a_target_of_negative_zero_has_no_sign():
    assert not np.signbit(validate_targets([-0.0], None)[0])
