"""What `hugging_face.call` runs in its environment, and how it answers."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import torch

from benchmarks.hugging_face_model import Learner, Player
from benchmarks.offline_setting import Setting
from benchmarks.original_loop import Batches, play_episode
from rlxf.envs.trajectories import Windows, load_trajectories
from rlxf.evaluation import evaluate

Answer = dict[str, Any]


def learn_and_ask(
    setting: Setting, dataset: str, updates: int, seed: int, episodes: int, targets: list[float]
) -> Answer:
    """Train on the windows that ours gets with this seed, then ask for each target: `TargetSweep` as data."""
    data = load_trajectories(dataset)
    learner = Learner(setting, data, updates, seed)
    windows, generator = Windows(data, setting.context_length), torch.Generator().manual_seed(seed)
    for _ in range(updates):
        learner.update(windows.sample(setting.batch_size, generator))
    player: Any = Player(learner)
    env = player.make_env(episodes)
    sweep = evaluate(player, env, episodes, target_returns=targets)
    env.close()
    return json.loads(sweep.to_json())


def time_original(
    setting: Setting, dataset: str, updates: int, seed: int, episodes: int, target: float
) -> Answer:
    """Seconds of each update of the original loop, and environment steps per second of its evaluation."""
    data = load_trajectories(dataset)
    learner = Learner(setting, data, updates, seed)
    batches, times = Batches(data, setting.context_length, seed), [time.perf_counter()]
    for _ in range(updates):
        learner.update(batches.sample(setting.batch_size))
        times.append(time.perf_counter())
    learner.model.eval()
    assert data.eval_env_spec is not None
    env = gymnasium.make(data.eval_env_spec)
    start = time.perf_counter()
    played = [play_episode(learner, env, target, seed=1_000_000 + e) for e in range(episodes)]
    seconds = time.perf_counter() - start
    steps = sum(length for _, length in played)
    updates_took = [after - before for before, after in pairwise(times)]
    return {"update_seconds": updates_took, "steps": steps, "seconds": seconds}


TASKS = {task.__name__: task for task in (learn_and_ask, time_original)}


def main() -> None:
    """Read the request in the first argument and write the answer where it says."""
    request = json.loads(sys.argv[1])
    answer = TASKS[request["task"]](Setting(**request["setting"]), **request["options"])
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
