"""Your own logged episodes as a Minari dataset, and a Decision Transformer trained on it.

The log is a table like that of any data recorder: one row per step, with the episode, the observation, the
action, the reward, and whether the episode ended. Here operators of very different skill balanced the pole of
CartPole for at most 200 steps, 80 on average. The agent learns from all of them, and is conditioned on a
return of 200.

    python own_dataset.py
"""

import gymnasium
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer

from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.evaluation import TargetSweep

TASK = "CartPole-v1"  # the spaces and the evaluation; signal_task.py shows how to register your own
DATASET = "examples/cartpole/operators-v0"
COLUMNS = ("episode", "observation", "action", "reward", "terminated", "truncated")
TARGET = 200.0  # the best return of the log


def recorded_log(episodes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the log of the operators; yours may be read with numpy.load or pandas.read_csv."""
    env, random = gymnasium.make(TASK, max_episode_steps=200), np.random.default_rng(seed)
    rows = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        carelessness, done = random.uniform(0.3, 1.0), False
        while not done:
            falls_right = observation[2] + observation[3] > 0  # angle and angular velocity of the pole
            action = random.integers(2) if random.random() < carelessness else int(falls_right)
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((episode, observation, action, reward, terminated, truncated))
            observation, done = following, terminated or truncated
    return {name: np.array(column) for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


def split_episodes(log: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the rows of each episode. One sort is faster than a search for the rows of each episode."""
    order = np.argsort(log["episode"], kind="stable")
    starts = np.flatnonzero(np.diff(log["episode"][order])) + 1
    columns = [np.split(column[order], starts) for column in log.values()]
    return [dict(zip(log, rows, strict=True)) for rows in zip(*columns, strict=True)]


def episode_buffer(rows: dict[str, np.ndarray]) -> EpisodeBuffer:
    """Return one episode in the form of Minari."""
    # Minari has one observation more than actions: the one after the last step. This log lacks it, as many
    # do, so the last one is repeated. Training does not use it, because no action follows.
    observations = np.concatenate([rows["observation"], rows["observation"][-1:]])
    return EpisodeBuffer(
        observations=observations,
        actions=rows["action"],
        rewards=rows["reward"].tolist(),
        terminations=rows["terminated"].tolist(),
        truncations=rows["truncated"].tolist(),
    )


def convert(log: dict[str, np.ndarray], name: str = DATASET) -> None:
    """Write the log as a Minari dataset. The environment gives the spaces, and evaluates agents later."""
    buffers = [episode_buffer(rows) for rows in split_episodes(log)]
    minari.create_dataset_from_buffers(
        name,
        buffers,
        env=gymnasium.make(TASK),
        author="me",
        algorithm_name="operators",
        description="Log of operators of different skill.",
        ref_min_score=22.0,  # optional: the returns that count as 0 and 100 points
        ref_max_score=500.0,
    )


def train(updates: int = 150, seed: int = 0) -> TargetSweep:
    """Train an agent on the dataset, and evaluate it with the target return."""
    agent = DecisionTransformer(
        DATASET,
        core=decision_transformer(width=64, layers=2, heads=2),
        context_length=10,
        learning_rate=1e-3,  # the default, 1e-4, is meant for 100,000 updates
        seed=seed,
    )
    agent.learn(updates, progress_bar=True)
    return evaluate(agent, episodes=20, target_returns=[TARGET])


def main() -> None:
    """Convert a log unless that has been done before, and train an agent."""
    if DATASET not in minari.list_local_datasets():
        convert(recorded_log(episodes=200))
    print(train())


if __name__ == "__main__":
    main()
