# %% [markdown]
"""# Bring your own environment

`GTrXLPPO` trains in any [Gymnasium](https://gymnasium.farama.org) environment with supported spaces. This
notebook writes one that needs memory, checks it, and trains an agent in it, in Python and on the command
line. [Use your own environment](../../docs/how-to/use-your-own-environment.md) lists further interfaces.
"""

# %% tags=["parameters"]
TIMESTEPS = 50_000
EPISODES = 100  # of the evaluation

# %% [markdown]
"""## Write the environment

In the n-back task, each observation shows one of four symbols. The agent names the symbol of two steps ago.
The reward is 1/18 for each right name, and the return of a perfect agent is 1. Guessing gives 0.25 on
average.

- The spaces describe each observation exactly: dtype, shape and bounds are checked.
- `super().reset(seed=seed)` makes `self.np_random`. Other random generators would ignore the seed.
- An episode is *terminated* if it ends by the rules of the task. It is *truncated* if only the time is over:
  then agents estimate the value of what would have followed.
"""

# %%
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

SYMBOLS, BACK, LENGTH = 4, 2, 20


class NBack(gymnasium.Env):
    """Name the symbol of two steps ago."""

    observation_space = Box(0.0, 1.0, (SYMBOLS,), np.float32)
    action_space = Discrete(SYMBOLS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = [int(self.np_random.integers(SYMBOLS))]
        return self.observation(), {}

    def step(self, action):
        asked = len(self.shown) > BACK
        right = asked and action == self.shown[-1 - BACK]
        self.shown.append(int(self.np_random.integers(SYMBOLS)))
        terminated = len(self.shown) > LENGTH
        return self.observation(), right / (LENGTH - BACK), terminated, False, {}

    def observation(self):
        return np.eye(SYMBOLS, dtype=np.float32)[self.shown[-1]]


# %% [markdown]
"""## Register and check it

With an id, copies of the environment can be made. `check_env` of Gymnasium finds most mistakes in spaces,
seeds and returned values. rlxf checks the spaces before training, and each observation and reward during
it.
"""

# %%
from gymnasium.utils.env_checker import check_env

TASK = "notebook/NBack-v0"
gymnasium.register(TASK, entry_point=NBack)
check_env(gymnasium.make(TASK).unwrapped)

# %% [markdown]
"""An agent for spaces that are not supported is refused with a sentence that names the remedy:"""

# %%
from rlxf import GTrXLPPO, evaluate


class Endless(NBack):
    """Task whose actions have no bounds."""

    action_space = Box(-np.inf, np.inf)


try:
    GTrXLPPO("MlpGTrXLPolicy", Endless())
except TypeError as error:
    print(error)

# %% [markdown]
"""## Train in Python

The memory is longer than the two steps that the task needs. The previous action is a part of the input of
each step: an agent that samples its actions cannot infer otherwise which one was executed. It is of no use in
this task, and `previous_action=False` would remove it.
"""

# %%
from rlxf.envs import make_vec_env

env = make_vec_env(TASK, n_envs=32, seed=0)
agent = GTrXLPPO(
    "MlpGTrXLPolicy", env, memory_length=8, segment_length=16, n_steps=16, batch_size=128, seed=0
)
agent.learn(TIMESTEPS)
print(evaluate(agent, TASK, episodes=EPISODES))

# %% [markdown]
"""With the sizes above, which took 80 seconds on one core, the mean return was 0.998.

## Train on the command line

Put the class and its registration into a module, for example `nback.py`. `--env module:id` imports it from
the working directory, or an installed one. The run folder has the configuration, checkpoints, logs and an
evaluation:

```bash
rlxf train gtrxl --env nback:notebook/NBack-v0 --core.memory.length 8 --run runs/nback
rlxf evaluate runs/nback --env nback:notebook/NBack-v0
```
"""
