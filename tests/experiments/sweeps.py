"""Sweeps with a training that is a function, for tests."""

import json
from collections.abc import Callable
from pathlib import Path

from rlxf.experiments.jobs import Job, Outcome
from rlxf.experiments.study import SweepStudy, open_study
from rlxf.experiments.sweep import TrialEnd, TrialRunner
from rlxf.experiments.sweep_file import read_sweep_plan

FILE = """\
command = "train gtrxl"
trials = 8

[settings]
env = "CartPole-v1"

[search]
gamma = { low = 0.0, high = 1.0 }
core.layers = [1, 2, 3]
"""
STEPS = 100


def job_of(folder: Path, options: dict, seed: int) -> Job:
    """Return a run whose options `fake_run` reads."""
    return Job(str(folder), "train gtrxl", (json.dumps(options | {"seed": seed}),))


def fake_run(job: Job, should_stop: Callable[[], bool] | None = None) -> Outcome:
    """Write the files of a run whose learning curve rises to ``gamma``, and the number of its attempts."""
    options, folder = json.loads(job.arguments[0]), Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "attempts", "a") as attempts:
        attempts.write("x")
    (folder / "config.json").write_text(json.dumps({"total_timesteps": STEPS}))
    rows = ["eval/mean_reward,time/total_timesteps"]
    for step in range(10, STEPS + 1, 10):
        rows.append(f"{options['gamma'] * step},{step}")
        (folder / "progress.csv").write_text("\n".join(rows) + "\n")
        if should_stop is not None and should_stop():
            return Outcome([], 75)
    returns = [options["gamma"] + options["seed"]] * 2
    (folder / "evaluation.json").write_text(json.dumps({"last": {"returns": returns}}))
    return Outcome([], 0)


def make_sweep(
    folder: Path, text: str = FILE, storage: str | None = None, make_job=job_of
) -> tuple[TrialRunner, SweepStudy, list[TrialEnd]]:
    """Return a sweep in a folder, its study, and a list to which each trial that ends is added."""
    folder.mkdir(exist_ok=True)
    path = folder / "sweep.toml"
    path.write_text(text)
    plan, ends = read_sweep_plan(path), []
    study = open_study(plan, folder, storage)
    return TrialRunner(plan, study, folder, make_job, ends.append), study, ends
