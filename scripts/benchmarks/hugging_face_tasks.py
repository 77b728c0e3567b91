"""Functions that `hugging_face.call` runs in the virtual environment of HF transformers."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import torch

from benchmarks.hugging_face_model import Learner, Player
from benchmarks.machine import now
from benchmarks.offline_runs import load_modules
from benchmarks.offline_setting import Setting
from benchmarks.original_loop import Batches, play_episode
from benchmarks.process_memory import peak_bytes, resident_bytes
from rlxf.data import Windows, load_trajectories
from rlxf.evaluation import evaluate

Answer = dict[str, Any]


def train_and_evaluate(
    setting: Setting, dataset: str, updates: int, seed: int, episodes: int, targets: list[float]
) -> Answer:
    """Train HF's model on windows that are drawn with this seed, and evaluate it.

    Returns:
        Its `TargetSweep` as JSON data, the CPU seconds of each update, and the peak memory of the training.
    """
    data = load_trajectories(dataset)
    load_modules(data)
    before = resident_bytes()
    learner = Learner(setting, data, updates, seed)
    windows, generator = Windows(data, setting.context_length), torch.Generator().manual_seed(seed)
    times = [time.process_time()]
    for _ in range(updates):
        learner.update(windows.sample(setting.batch_size, generator))
        times.append(time.process_time())
    costs = {"update_seconds": intervals(times), "bytes": peak_bytes() - before}
    player: Any = Player(learner)
    env = player.make_env(episodes)
    sweep = evaluate(player, env, episodes, target_returns=targets)
    env.close()
    return json.loads(sweep.to_json()) | costs


def intervals(times: list[float]) -> list[float]:
    """Return the differences of consecutive times."""
    return [after - before for before, after in pairwise(times)]


def time_original(
    setting: Setting, dataset: str, updates: int, seed: int, episodes: int, target: float, device: str
) -> Answer:
    """Measure each update of the original training loop, and steps and seconds of its evaluation."""
    data = load_trajectories(dataset)
    learner = Learner(setting, data, updates, seed, device)
    batches, times = Batches(data, setting.context_length, seed, device), [now(device)]
    for _ in range(updates):
        learner.update(batches.sample(setting.batch_size))
        times.append(now(device))
    steps, seconds = time_evaluation(learner, episodes, target)
    return {"update_seconds": intervals(times), "steps": steps, "seconds": seconds}


def time_evaluation(learner: Learner, episodes: int, target: float) -> tuple[int, float]:
    """Return the number of steps and the seconds of the original evaluation."""
    learner.model.eval()
    assert learner.trajectories.eval_env_spec is not None
    env = gymnasium.make(learner.trajectories.eval_env_spec)
    start = now(learner.device)
    results = [play_episode(learner, env, target, seed=1_000_000 + e) for e in range(episodes)]
    return sum(length for _, length in results), now(learner.device) - start


TASKS = {task.__name__: task for task in (train_and_evaluate, time_original)}


def main() -> None:
    """Run the request in the first argument, and write the result to the file that it names."""
    request = json.loads(sys.argv[1])
    answer = TASKS[request["task"]](Setting(**request["setting"]), **request["options"])
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
