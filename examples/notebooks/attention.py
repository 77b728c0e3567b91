# %% [markdown]
"""# What an agent attends to

An agent with memory can be right for the wrong reason. Attention weights show which earlier steps its
layers read. This notebook trains an agent on a T-Maze, writes the page of `rlxf attention`, and draws the
same weights with the functions of the library. [See what an agent attends
to](../../docs/how-to/inspect-training.md#see-what-an-agent-attends-to) has the details.
"""

# %% tags=["parameters"]
TIMESTEPS = 40_000
CORRIDOR = 10  # steps between the hint and the junction

# %% [markdown]
"""## Train a run

`rlxf train gtrxl` makes a folder with the configuration, checkpoints and logs. A line with `!` is a command
of the shell, in which names in braces are variables of the notebook.
"""

# %%
maze = f"--env rlxf/TMaze-v0 --env-kwargs '{{\"corridor_length\": {CORRIDOR}}}'"
settings = "--core.memory.length 16 --seed 0 --no-progress-bar"
# !rlxf train gtrxl {maze} {settings} --total-timesteps {TIMESTEPS} --run runs/maze

# %% [markdown]
"""## Write the page

`rlxf attention` plays an episode with the agent of the run. `attention.html` is one file that any browser
opens without a network: a slider selects a step, and rows show the attention of each layer and head to
earlier steps.
"""

# %%
# !rlxf attention runs/maze

# %% [markdown]
"""## Read the weights in Python

`episode_inspector` wraps an agent and keeps what it sees in one episode of one environment. `play` runs it
until the episode ends.
"""

# %%
from rlxf import GTrXLPPO
from rlxf.agents.inspection import episode_inspector
from rlxf.envs import make_vec_env
from rlxf.evaluation.rollout import play

agent = GTrXLPPO.load("runs/maze/checkpoint.zip")
inspector = episode_inspector(agent)
env = make_vec_env("rlxf/TMaze-v0", n_envs=1, seed=0, env_kwargs={"corridor_length": CORRIDOR})
for _, done, _ in play(inspector, env, deterministic=True):
    if done[0]:
        break
attention = inspector.attention()
last = attention.weights[-1][..., 0]  # of the last step: (layers, heads, steps)
print("layers", attention.layers, "heads", last.shape[1], "steps", last.shape[2])

# %% [markdown]
"""The last step is the choice of the arm. Each row of the picture is a head, and each column a step of the
episode. The hint was visible in step 0 only.
"""

# %%
import matplotlib.pyplot as plt

heads = [f"layer {layer}, head {head + 1}" for layer in attention.layers for head in range(last.shape[1])]
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
picture = axes.imshow(last.reshape(len(heads), -1), cmap="magma", vmin=0, vmax=1)
axes.set_yticks(range(len(heads)), heads)
axes.set(xlabel="step that is attended to", title="attention at the choice of the arm")
figure.colorbar(picture)
plt.show()

# %% [markdown]
"""With the sizes above, the training took about a minute on one core, and the agent succeeded in all of 100
episodes. Two heads of the first layer attend to step 0 more than to any other step: they read the hint from
memory. Two heads of the second layer attend to the last step itself, in which the first layer has added
what it read. Others attend to the corridor, whose steps may hold copies of the hint.
"""

# %% [markdown]
"""## Read the gates

A GRU gate decides how much of the stream its sublayer replaces: 0 keeps the stream, 1 replaces it. The
inspector has the mean of each update gate over the features, at each step.
"""

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, means in attention.gates.items():
    axes.plot(means, label=name)
axes.set(xlabel="step", ylabel="mean update gate")
axes.legend(fontsize="small")
plt.show()

# %% [markdown]
"""The gates of the two attention layers are most open in the first step, which shows the hint, and in the
last one, which needs it. In the corridor, where nothing new is seen, they change the stream less.
"""
