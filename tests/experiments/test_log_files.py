"""Tests of logs: those that SB3 writes, and damaged, huge and malicious ones."""

import io
import json
import pickle
import tracemalloc
import warnings
import zipfile

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.logger import CSVOutputFormat
from stable_baselines3.common.monitor import Monitor

from rlxf.experiments import columns
from rlxf.experiments.columns import trailing_mean
from rlxf.experiments.curves import describe_metrics, find_curve, metrics_of
from rlxf.experiments.log_files import MonitorLog, _continued, open_logs
from rlxf.utils import files
from tests.experiments.logs import write_evaluations, write_monitor, write_run

EVAL = "eval/mean_reward"


@pytest.fixture(autouse=True)
def _no_other_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def table(tmp_path, text, name="log.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refuse(path, metric, message):
    with pytest.raises(ValueError, match=message) as failure:
        find_curve(path, metric)
    assert "\n" not in str(failure.value)


# Files of rlxf and Stable-Baselines3


def test_metrics_of_a_run_are_read_without_empty_fields(tmp_path):
    run = write_run(tmp_path / "run", (1, 2, 4))
    assert metrics_of(run) == [EVAL, "rollout/ep_rew_mean"]
    assert find_curve(run, EVAL).steps.tolist() == [100, 200, 300]
    assert find_curve(run, EVAL).values.tolist() == [1, 2, 4]
    assert find_curve(run, "rollout/ep_rew_mean").values.tolist() == [0.5, 1, 2]


def test_files_of_the_csv_logger_are_read(tmp_path):
    writer = CSVOutputFormat(str(tmp_path / "progress.csv"))
    for step in (10, 20, 30):
        values = {"time/total_timesteps": step, "rollout/ep_rew_mean": step / 10, "note": 'a "b", c'}
        values |= {EVAL: 7.0} if step == 20 else {}
        writer.write(values, {name: () for name in values})
    writer.close()
    assert find_curve(tmp_path, "rollout/ep_rew_mean").values.tolist() == [1, 2, 3]
    assert find_curve(tmp_path, EVAL).steps.tolist() == [20]


def test_episodes_of_several_monitor_files_are_ordered_in_time(tmp_path):
    """As in SB3's ``load_results`` and ``ts2xy``, which need pandas."""
    envs = [Monitor(gymnasium.make("CartPole-v1"), str(tmp_path / f"{worker}")) for worker in range(3)]
    for worker, env in enumerate(envs):
        for episode in range(4):
            env.reset(seed=10 * worker + episode)
            env.action_space.seed(episode)
            while True:
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if terminated or truncated:
                    break
        env.close()
    episodes = []
    for file in sorted(tmp_path.glob("*.monitor.csv")):
        header, _, *rows = file.read_text().splitlines()
        start = json.loads(header[1:])["t_start"]
        for row in rows:
            total, length, end = row.split(",")
            episodes.append((start + float(end), float(total), int(length)))
    curve, steps = find_curve(tmp_path, "r"), 0
    for (_, total, length), step, value in zip(sorted(episodes), curve.steps, curve.values, strict=True):
        steps += length
        assert (step, value) == (steps, total)
    (log,) = [MonitorLog(*sorted(tmp_path.glob("*.monitor.csv")))]
    assert log.task == "CartPole-v1"


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("seed1.monitor.csv", 2000, "has 2 files of Monitor, .* but some end before others begin"),
        ("eval.monitor.csv", 1000, "but eval.monitor.csv may be of evaluations"),
    ],
)
def test_monitor_files_of_several_trainings_cause_a_warning(tmp_path, name, start, message):
    write_monitor(tmp_path / "seed0.monitor.csv", [1, 2], start=1000)
    write_monitor(tmp_path / name, [3, 4], start=start)
    with pytest.warns(UserWarning, match=message):
        assert len(find_curve(tmp_path, "r").values) == 4
    assert len(find_curve(tmp_path / name, "r").values) == 2


def test_monitor_files_of_parallel_environments_cause_no_warning(tmp_path):
    write_monitor(tmp_path / "0.monitor.csv", [1] * 9, start=1000)
    write_monitor(tmp_path / "1.monitor.csv", [2], start=1001)
    write_monitor(tmp_path / "2.monitor.csv", [], start=9999)
    assert len(find_curve(tmp_path, "r").values) == 10


def test_a_value_that_is_left_out_is_named_with_its_own_file(tmp_path):
    write_monitor(tmp_path / "0.monitor.csv", np.ones(3))
    write_monitor(tmp_path / "1.monitor.csv", np.array([1, np.nan, 1]))
    with pytest.warns(UserWarning, match=r"1\.monitor\.csv line 4: r is nan"):
        assert len(find_curve(tmp_path, "r").values) == 5


def test_returns_of_monitor_files_are_averaged_over_100_episodes(tmp_path):
    returns = np.random.default_rng(0).normal(size=250).round(3)
    write_monitor(tmp_path / "monitor.csv", returns)
    found = find_curve(tmp_path, "rollout/ep_rew_mean").values
    assert found == pytest.approx([returns[max(0, i - 99) : i + 1].mean() for i in range(250)])


def test_evaluations_of_stable_baselines3_are_read(tmp_path):
    path = write_evaluations(tmp_path / "evaluations.npz", [[1, 3], [5, 7]], successes=[[True, False]] * 2)
    assert metrics_of(path) == [EVAL, "eval/mean_ep_length", "eval/success_rate"]
    assert find_curve(path, EVAL).values.tolist() == [2, 6]
    assert find_curve(tmp_path, "eval/success_rate").values.tolist() == [0.5, 0.5]


def test_the_first_log_of_a_folder_with_the_metric_counts(tmp_path):
    run = write_run(tmp_path / "run")
    write_evaluations(run / "evaluations.npz", [[9, 9]])
    write_monitor(run / "0.monitor.csv", [5, 5])
    assert find_curve(run, EVAL).values.tolist() == [1, 2, 3]
    assert find_curve(run, "eval/mean_ep_length").values.tolist() == [9]
    assert find_curve(run, "r").values.tolist() == [5, 5]


@pytest.mark.parametrize("name", ["step", "steps", "timesteps", "total_timesteps", "time/total_timesteps"])
def test_plain_tables_are_read(tmp_path, name):
    path = table(tmp_path, f"loss,{name}\r\n1.5,10\r\n0.5,20")  # the last line has no newline
    assert find_curve(path, "loss").values.tolist() == [1.5, 0.5]
    assert metrics_of(path) == ["loss"]


def test_tables_of_pandas_are_read(tmp_path):
    """``DataFrame.to_csv`` writes an unnamed column of row numbers, and NaN as an empty field."""
    path = table(tmp_path, ",step,score\n0,1,3.0\n1,2,\n")
    assert find_curve(path, "score").values.tolist() == [3]
    assert metrics_of(path) == ["score"]


def test_unordered_and_repeated_steps_are_sorted_and_the_last_counts(tmp_path):
    path = table(tmp_path, "step,x\n30,3\n10,1\n20,2\n10,9\n")
    with pytest.warns(UserWarning, match=r"log\.csv line 5: the step 10 occurs again, and its last value"):
        curve = find_curve(path, "x")
    assert (curve.steps.tolist(), curve.values.tolist()) == ([10, 20, 30], [9, 2, 3])


@pytest.mark.parametrize("end", ["400,4", "400,", "4", "400,4,5,6,7", '400,"4'])
def test_a_line_that_is_being_written_is_left_out(tmp_path, end):
    run = write_run(tmp_path / "run")
    with open(run / "progress.csv", "a") as file:
        file.write(end)
    assert find_curve(run, EVAL).values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("end", ["", "4", "4,10", "4,10,"])
def test_an_episode_that_is_being_written_is_left_out(tmp_path, end):
    path = write_monitor(tmp_path / "monitor.csv", [1, 2])
    path.write_text(path.read_text() + end)
    assert find_curve(path, "r").values.tolist() == [1, 2]


# Missing and damaged content


@pytest.mark.parametrize("text", ["", "\n", "time/total_ti"])
def test_an_empty_log_has_no_metric(tmp_path, text):
    table(tmp_path, text, "progress.csv")
    assert metrics_of(tmp_path) == []
    assert find_curve(tmp_path, EVAL) is None
    assert describe_metrics(EVAL, []) == ": nothing was logged yet"


def test_a_missing_metric_names_similar_and_existing_ones(tmp_path):
    run = write_run(tmp_path / "run")
    assert find_curve(run, "eval/mean_rewards") is None
    metrics = f"{EVAL}, rollout/ep_rew_mean"
    similar = describe_metrics("eval/mean_rewards", metrics_of(run))
    assert similar == f"; did you mean {EVAL}? The metrics are {metrics}"
    assert describe_metrics("xyz", metrics_of(run)) == f"; the metrics are {metrics}"


@pytest.mark.thorough
def test_many_metrics_are_counted(tmp_path):
    path = table(tmp_path, "step," + ",".join(f"m{i}" for i in range(5000)) + "\n")
    message = describe_metrics("other", metrics_of(path))
    assert "and 4988 more" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,x\n1,2\n3\n", "log.csv line 3 has 1 fields instead of 2"),
        ("step,x\n1,2,3\n", "log.csv line 2 has 3 fields instead of 2"),
        ("step,x\n1,2\n\n2,two\n", "log.csv line 4: x must be a number, got 'two'"),
        ("step,x\n,2\n", "log.csv line 2: step must be a number, got ''"),
        ("step,x\nnan,2\n", "log.csv line 2: step must be from 0 to 1e18, got nan"),
        ("step,x\n-1,2\n", "line 2: step must be from 0 to 1e18"),
        ("step,x\n1e300,2\n", "line 2: step must be from 0 to 1e18"),
        ("step,x,x\n1,2,3\n", "must have one column x, got step, x, x"),
        ("time,x\n1,2\n", "no column of steps .*; its columns are time, x"),
        (b"\x00\xff\x00,x\n", "no column of steps"),
        ("step,x\n1,2\n3," + 200_000 * "4" + "\n", "log.csv line 3: field larger than field limit"),
        ("step,x\n1," + 5_000 * "z" + "\n", "line 2: x must be a number, got 'zzz"),
    ],
    ids=range(12),
)
def test_damage_is_one_sentence_with_file_and_line(tmp_path, text, message):
    path = table(tmp_path, text)
    refuse(path, "x", message)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300"])
def test_values_that_are_not_finite_are_left_out_with_a_warning(tmp_path, value):
    path = table(tmp_path, f"step,x\n1,2\n2,{value}\n3,4\n4,{value}\n")
    with pytest.warns(UserWarning, match=r"log.csv line 3: x is .*; 2 such values are left out"):
        assert find_curve(path, "x").steps.tolist() == [1, 3]


def test_a_metric_without_finite_value_has_no_curve(tmp_path):
    path = table(tmp_path, "step,x\n1,nan\n")
    with pytest.warns(UserWarning, match="line 2: x is nan"):
        assert find_curve(path, "x") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r,l,t\n1,2,3\n", "line 1 must be # and a JSON object"),
        ("#[1]\nr,l,t\n", "line 1 must be # and a JSON object"),
        ("#" + 100_000 * "[" + "\nr,l,t\n", "line 1 must be # and a JSON object"),
        ("#{}\nr,l,t\n1,2\n", "monitor.csv line 3 has 2 fields"),
        ("#{}\nr,l,t\n1,-2,3\n", "monitor.csv line 3: l must be from 0 to 1e18"),
        ("#{}\nr,l,t\n1,2,3\n1,2,nan\n", "monitor.csv line 4: .* t finite"),
        ("#{}\nr,l,t\n1,,3\n", "monitor.csv line 3: l must be a number"),
        ("#{}\nr,t\n1,3\n", "one column l"),
    ],
    ids=range(8),
)
def test_damaged_monitor_files_are_refused(tmp_path, text, message):
    refuse(table(tmp_path, text, "monitor.csv"), "r", message)


@pytest.mark.parametrize("start", ["[1]", "1" + 300 * "0"])
def test_a_broken_start_time_is_ignored(tmp_path, start):
    path = table(tmp_path, f'#{{"t_start": {start}, "env_id": 5}}\nr,l,t\n1,2,3\n', "monitor.csv")
    assert find_curve(path, "r").values.tolist() == [1]
    assert MonitorLog(path).task == ""


def test_a_monitor_file_that_was_extended_keeps_its_order(tmp_path):
    """Times of a resumed training begin again at 0."""
    rows = [f"{number},1,{number % 20}" for number in range(40)]
    path = table(tmp_path, "#{}\nr,l,t\n" + "\n".join(rows) + "\n", "monitor.csv")
    assert find_curve(path, "r").values.tolist() == [*range(40)]


def test_a_correction_of_the_clock_is_no_restart():
    assert _continued(np.array([1, 2, 3, 2.9, 4])).tolist() == [1, 2, 3, 3, 4]
    assert _continued(np.array([1, 5, 1, 4])).tolist() == [1, 5, 6, 9]
    assert _continued(np.empty(0)).size == 0


def test_unordered_steps_and_two_values_at_the_end_do_not_warn(tmp_path):
    assert find_curve(table(tmp_path, "step,x\n1,3\n2,1\n2,5\n"), "x").values.tolist() == [3, 5]
    assert find_curve(table(tmp_path, "step,x\n30,3\n10,1\n"), "x").values.tolist() == [1, 3]


def test_steps_of_stable_baselines3_may_repeat(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve = find_curve(table(tmp_path, "time/total_timesteps,y\n1,2\n1,4\n", "progress.csv"), "y")
    assert curve.values.tolist() == [4]


# Malicious content


def test_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_LOG_BYTES", 1000)
    refuse(table(tmp_path, "step,x\n" + 1000 * "1,2\n"), "x", "exceeds 1,000 bytes")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"step,{'x,' * 600_000}y\n1,2\n", 1),
        (f"step,y\n1,2\n{'1,' * 600_000}2\n", 3),
        ("step,y\n1,2\n" + ",".join([f'"{1000 * "a"}\n"'] * 1100) + "\n", 1047),
    ],
    ids=["header", "row", "row of many lines"],
)
def test_long_rows_are_refused(tmp_path, text, line):
    refuse(table(tmp_path, text), "y", rf"line {line}: more than 1,048,576 characters")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_of_other_compression_methods_are_refused(tmp_path, method):
    """Python decompresses them as a whole, regardless of the size that the file states."""
    path = tmp_path / "evaluations.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("timesteps.npy", npy(np.arange(3.0)))
    refuse(path, EVAL, "compressed by another method")


def test_symbolic_links_in_a_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    table(tmp_path, "step,x\n1,2\n", "elsewhere.csv")
    for name in ("progress.csv", "0.monitor.csv"):
        (folder / name).symlink_to(tmp_path / "elsewhere.csv")
        with pytest.raises(ValueError, match=f"{name} is a symbolic link, .* give the path of its target"):
            open_logs(folder)
        (folder / name).unlink()


def test_a_long_name_of_a_column_is_refused(tmp_path):
    refuse(table(tmp_path, f"{200_000 * 'x'},y\n1,2\n"), "y", "line 1: field larger than field limit")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_damaged_compressed_arrays_are_refused(tmp_path, method):
    path = tmp_path / "evaluations.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("timesteps.npy", npy(np.random.default_rng(0).random(100)))
        start = len("timesteps.npy") + 30
    data = bytearray(path.read_bytes())
    data[start + 10 : start + 200] = bytes([0xFF]) * 190
    path.write_bytes(data)
    refuse(path, EVAL, "is not an evaluations.npz of EvalCallback")


def npz(tmp_path, **members):
    path = tmp_path / "evaluations.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(array):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), allow_pickle=True)
    return stream.getvalue()


def npy_with_header(header):
    """Return an NPY file of 16 bytes with any text as its header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


def shaped(shape):
    return npy_with_header(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n")


class Evil:
    def __reduce__(self):
        return (open, ("/nowhere/executed", "w"))


STEPS = npy(np.array([10.0]))
EMPTY_HEADER = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**30}, 0)}}"
"""Header of an array without elements whose first axis is longer than any integer of NumPy."""


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"timesteps": npy(np.array([Evil()], dtype=object))}, "has the type object"),
        ({"timesteps": pickle.dumps(1)}, "is not an evaluations.npz"),
        ({"timesteps": STEPS, "results": shaped((1, 10**14))}, r"shape \(1, 100000000000000\)"),
        ({"timesteps": shaped((-1,))}, "an array has|is not an evaluations"),
        ({"timesteps": npy_with_header(f"{EMPTY_HEADER}\n")[:-16]}, "is not an evaluations.npz"),
        ({"timesteps": npy_with_header("(" * 60_000)}, "a damaged header"),
        ({"timesteps": npy_with_header("{'descr': (")}, "a damaged header"),
        ({"timesteps": npy(np.array(["a"]))}, "has the type <U1"),
        ({"timesteps": npy(np.ones((2, 2)))}, "must contain timesteps"),
        ({"timesteps": npy([np.nan]), "results": npy(np.ones((1, 2)))}, "must contain timesteps"),
        ({"results": npy(np.ones((1, 2)))}, "must contain timesteps"),
        ({"timesteps": STEPS, "results": npy(np.zeros(8 * 2**20 + 1))}, "exceed 67,108,864 bytes"),
    ],
    ids=range(12),
)
def test_malicious_arrays_are_refused(tmp_path, members, message):
    refuse(npz(tmp_path, **members), EVAL, message)


def test_results_without_a_step_each_are_no_metric(tmp_path):
    assert find_curve(npz(tmp_path, timesteps=STEPS, results=npy(np.ones((3, 2)))), EVAL) is None


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\x80\x04K\x01."])
def test_other_files_are_no_evaluations(tmp_path, data):
    path = tmp_path / "evaluations.npz"
    path.write_bytes(data)
    refuse(path, EVAL, "evaluations.npz|must contain timesteps")


def test_a_small_file_needs_little_memory(tmp_path):
    path = table(tmp_path, "step,x\n" + 20_000 * "1,2\n" + "x" * 10**6)
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 20002"):
        find_curve(path, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * path.stat().st_size


@pytest.mark.parametrize("window", [1, 3, 7, 19, 20, 100])
def test_trailing_means_equal_a_loop(window):
    values = np.random.default_rng(0).normal(1e6, 1, size=20)
    slow = [values[max(0, i - window + 1) : i + 1].mean() for i in range(20)]
    assert trailing_mean(values, window) == pytest.approx(slow, rel=1e-12)
    assert trailing_mean(np.empty(0), window).shape == (0,)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("spike", [1e18, -1e100, np.inf, np.nan])
def test_a_spike_affects_the_means_of_its_window_only(window, spike):
    values = np.array([0.5, spike, 0.7, 0.8, 0.1, 0.3, 0.2, 0.9])
    slow = [values[max(0, i - window + 1) : i + 1].mean() for i in range(8)]
    assert trailing_mean(values, window) == pytest.approx(slow, rel=1e-12, nan_ok=True)
    assert np.array_equal(trailing_mean(values, 1), values, equal_nan=True)
