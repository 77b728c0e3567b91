"""Writers of logs for the tests of experiments."""

import json
from pathlib import Path

import numpy as np

PROGRESS = "time/total_timesteps,eval/mean_reward,rollout/ep_rew_mean\n"


def write_run(folder, values=(1.0, 2.0, 3.0), seed=0, finished=True, step=100, **config):
    """Write a run of rlxf with an evaluation every ``step`` steps, and return its folder."""
    path = Path(folder)
    path.mkdir(parents=True)
    settings = {"agent": "gtrxl", "env": "CartPole-v1", "env_kwargs": {}, "seed": seed, "n_envs": 4}
    (path / "config.json").write_text(json.dumps(settings | config))
    rows = [f"{step * (i + 1)},{value},\n{step * (i + 1)},,{value / 2}\n" for i, value in enumerate(values)]
    (path / "progress.csv").write_text(PROGRESS + "".join(rows))
    if finished:
        (path / "completed.json").write_text("{}")
    return path


def write_monitor(file, returns, start=0.0, env_id="CartPole-v1", length=10):
    """Write a file of SB3's ``Monitor`` with an episode for each return, and return its path."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{value},{length},{i + 1}.5\n" for i, value in enumerate(returns)]
    header = f"#{json.dumps({'t_start': start, 'env_id': env_id})}\nr,l,t\n"
    path.write_text(header + "".join(rows))
    return path


def write_evaluations(file, results, step=100, **arrays):
    """Write a file of SB3's ``EvalCallback`` with returns (n, episodes), and return its path."""
    results = np.asarray(results, float)
    steps = step * np.arange(1, len(results) + 1)
    np.savez(file, timesteps=steps, results=results, ep_lengths=results.astype(int), **arrays)
    return Path(file)
