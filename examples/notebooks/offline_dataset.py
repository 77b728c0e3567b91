# %% [markdown]
"""# From a dataset to a policy that reaches a requested return

A Decision Transformer learns from recorded episodes, and acts for the return that it is asked for. This
notebook records a dataset, trains a Decision Transformer and two baselines, and compares requested with
reached returns. The [tutorial](../../docs/tutorials/train-decision-transformer.md) explains each step.
"""

# %% tags=["parameters"]
EPISODES = 400  # in the dataset
UPDATES = 1500  # of each agent
EVALUATED = 100  # episodes of each evaluation

# %% [markdown]
"""## Record a dataset

The task is a T-Maze with a corridor of five steps, as in the [notebook on memory](memory_task.py). With
`penalty_rule="step"`, each step that does not lead to the junction costs 0.2, and the goal is worth 1.

`collect` records any object with the `predict` method of Stable-Baselines3 as a
[Minari](https://minari.farama.org) dataset. This player keeps the hint of the first step as its `state`.
`mix` replaces a part of its actions by random ones, so the returns of the episodes are very different.
"""

# %%
import gymnasium
import minari
import numpy as np

import rlxf  # registers the task


class Player:
    """Walk to the junction, and take the arm of the hint."""

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        hint = observation[:, 1] if state is None else np.where(episode_start, observation[:, 1], state[0])
        arm = np.where(hint > 0, 1, 3)
        return np.where(observation[:, 0] == 1, arm, 0), (hint,)


def make_env():
    return gymnasium.make("rlxf/TMaze-v0", corridor_length=5, penalty_rule="step")


DATASET = "notebook/maze-players-v0"
if DATASET not in minari.list_local_datasets():
    rlxf.collect(Player(), make_env(), DATASET, episodes=EPISODES, mix=(0, 0.1, 0.2, 0.4, 0.6, 0.8, 1))

# %% [markdown]
"""## Look at the data

A return of 1 is success, 0 the wrong arm, and each idle step costs 0.2. All of them occur in the data.
"""

# %%
import matplotlib.pyplot as plt

from rlxf.data import load_trajectories

data = load_trajectories(DATASET)
print(f"{data.episodes} episodes, mean return {data.returns.mean():.2f}")
plt.hist(data.returns, bins=20)
plt.gca().set(xlabel="return", ylabel="episodes")
plt.show()

# %% [markdown]
"""## Train

`BehaviorCloning` imitates all episodes, or the share `best` with the highest returns. Each of the two has
one behavior. The Decision Transformer sees the return that is still to come at each step, so it learns the
behavior for each return. `context_length` is the number of steps that an agent sees. Here it is a whole
episode, because the hint is in its first step.
"""

# %%
from rlxf import BehaviorCloning, DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import decision_transformer

settings = {"context_length": 6, "learning_rate": 1e-3, "seed": 0}  # an episode has six steps
agent = DecisionTransformer(DATASET, core=decision_transformer(width=64, layers=2, heads=2), **settings)
clones = {
    "cloning of all": BehaviorCloning(DATASET, **settings),
    "cloning of the best 10%": BehaviorCloning(DATASET, best=0.1, **settings),
}
for learner in (agent, *clones.values()):
    learner.learn(UPDATES)

# %% [markdown]
"""## Ask for several returns

`evaluate` plays the same episodes for each of several target returns.
"""

# %%
targets = [1, 0, -0.2, -0.4, -0.6, -0.8, -1]
sweep = evaluate(agent, make_env(), episodes=EVALUATED, target_returns=targets)
print(sweep)
reports = {name: evaluate(clone, make_env(), episodes=EVALUATED) for name, clone in clones.items()}
print(*(f"{name}: {report}" for name, report in reports.items()), sep="\n")

# %% [markdown]
"""With the sizes above, which took two minutes on one core, the Decision Transformer reached each target
exactly, from 1 to -1. Other seeds and versions can give other numbers, most likely for the target 0, of which
the data have few episodes. Both clones reached 1. The random actions of the players have no
direction, so the most likely action of a clone is that of the good player, even if most of the episodes
failed. The clones cannot act for any other return.

## Plot achieved against target returns
"""

# %%
figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
axes.plot(targets, targets, color="gray", linestyle="--", label="target")
axes.plot(sweep.targets, sweep.achieved, "o-", label="Decision Transformer")
for (name, report), color, style in zip(reports.items(), ("C1", "C2"), ("-", ":"), strict=True):
    axes.axhline(report.mean, color=color, linestyle=style, linewidth=2, label=name)
axes.set(xlabel="target return", ylabel="achieved return")
axes.legend()
plt.show()
