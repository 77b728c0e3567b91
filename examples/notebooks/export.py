# %% [markdown]
"""# Export an agent and play it without rlxf

A trained agent can act on a machine that has neither rlxf nor torch. This notebook trains an agent with
memory, exports its acting step as ONNX, and plays the file with onnxruntime and numpy alone. [Export
agents](../../docs/how-to/export-agents.md) lists what can be exported.
"""

# %% tags=["parameters"]
TIMESTEPS = 20_000
EPISODES = 20  # of the comparison

# %% [markdown]
"""## Train and export

The T-Maze shows a hint in the first step and needs it in the last one, so the exported step needs its
memory.
"""

# %%
from rlxf import GTrXLPPO
from rlxf.envs import make_vec_env

env = make_vec_env("rlxf/TMaze-v0", n_envs=32, seed=0, env_kwargs={"corridor_length": 5})
agent = GTrXLPPO(
    "MlpGTrXLPolicy", env, memory_length=16, segment_length=16, n_steps=16, batch_size=128, seed=0
)
agent.learn(TIMESTEPS)
agent.export("policy.onnx")

# %% [markdown]
"""The export wrote four files: the step with its weights, a description, checksums, and a module that plays
the file. The description lists the inputs and outputs of the graph. Each `state.NAME` receives the value of
`next_state.NAME` of the step before.
"""

# %%
import json
from pathlib import Path

for name in ("policy.onnx", "policy.json", "policy.sha256", "onnx_player.py"):
    print(name, Path(name).is_file())
description = json.loads(Path("policy.json").read_text())
for part in ("inputs", "outputs"):
    print(part, [entry if isinstance(entry, str) else entry["name"] for entry in description[part]])

# %% [markdown]
"""## Play it

`Player` has the method `predict` of Stable-Baselines3. The program below runs in a process of its own, to
show that neither rlxf nor torch is imported. It plays the rules of the T-Maze in a few lines of numpy.
"""

# %%
import subprocess
import sys

program = f"""
import sys
import numpy as np
from onnx_player import Player

player, random, successes = Player("policy.onnx"), np.random.default_rng(0), 0
for _ in range({EPISODES}):
    hint, state = random.choice([-1, 1]), None  # state=None starts an episode
    for cell in range(6):
        observation = np.array([cell == 5, hint * (cell == 0)], np.float32)
        action, state = player.predict(observation, state)
        if action != 0:  # not to the right: only an arm is left
            break
    successes += cell == 5 and action == (1 if hint == 1 else 3)
print("successes:", successes, "of", {EPISODES})
print("imported:", [name for name in ("rlxf", "torch", "onnxruntime", "numpy") if name in sys.modules])
"""
done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
print(done.stdout)

# %% [markdown]
"""## Compare it with the agent

In this process both are available. They choose the same actions.
"""

# %%
import numpy as np

sys.path.insert(0, ".")
from onnx_player import Player

one = make_vec_env("rlxf/TMaze-v0", n_envs=1, seed=1000, env_kwargs={"corridor_length": 5})
player, equal, steps = Player("policy.onnx"), 0, 6 * EPISODES
observation, state, played, start = one.reset(), None, None, np.ones(1, dtype=bool)
for _ in range(steps):
    actions, state = agent.predict(observation, state, start, deterministic=True)
    action, played = player.predict(observation[0], None if start[0] else played)
    equal += int(action == actions[0])
    observation, _, start, _ = one.step(actions)
print("equal actions:", equal, "of", steps)

# %% [markdown]
"""With the sizes above, which took 50 seconds on one core, the player succeeded in 20 of 20 episodes, and all
actions were equal.

An export does not make training faster. For that, `GTrXLPPO(compile=True)` compiles the acting step of
rollouts and of `predict` on machines with a C++ compiler; [settings of
agents](../../docs/reference/agents.md) has the details.
"""
