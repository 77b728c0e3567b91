# %% [markdown]
"""# Add a technique

A transformer of rlxf is the answer to seven questions, such as how positions are encoded or how a sublayer
is added to the residual stream. [Techniques](../../docs/reference/techniques.md) lists the answers.
`register_technique` adds one from outside of the package. This notebook adds a residual connection, checks
that acting with it equals training with it, and trains an agent. [log_sparse.py](../log_sparse.py) does the
same for an attention pattern.
"""

# %% tags=["parameters"]
TIMESTEPS = 20_000
EPISODES = 200  # of the evaluation

# %% [markdown]
"""## Write the technique

LayerScale (Touvron et al. 2021, [arXiv:2103.17239](https://arxiv.org/abs/2103.17239), section 2) multiplies
the output y of each sublayer by learned numbers, one for each feature: `x + scale * y`. The numbers are
small before training, so that each layer starts near the identity.

A technique is a frozen dataclass. Its fields are the options, with values that JSON has. `build` returns
the module. `paper` is shown by `rlxf techniques`.
"""

# %%
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from rlxf.attention import TokenIndex, register_technique
from rlxf.attention.residuals.base import Residual
from rlxf.utils.checks import check_finite_number


class ScaledSum(nn.Module):
    """x + scale * y."""

    def __init__(self, initial, width):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), float(initial)))

    def forward(self, x, y):
        return x + self.scale * y


@register_technique("residual")
@dataclass(frozen=True)
class LayerScale(Residual):
    """x + scale * y, with a learned scale for each feature that starts at ``initial``."""

    paper: ClassVar[str] = "Touvron et al. 2021, arXiv:2103.17239"
    initial: float = 0.1

    def __post_init__(self):
        check_finite_number("initial", self.initial)  # values may come from a file

    def build(self, width, heads):
        return ScaledSum(self.initial, width)


# %% [markdown]
"""## Use it

The spec of a transformer accepts the technique, and so do its JSON form and checkpoints of this process. A
process that loads such a checkpoint has to import the module of the technique first, because files import
nothing.
"""

# %%
from dataclasses import replace

from rlxf import GTrXLPPO, TransformerSpec, evaluate
from rlxf.agents.gtrxl import gtrxl

spec = replace(gtrxl(memory_length=16), residual=LayerScale())
assert TransformerSpec.from_json(spec.to_json()) == spec
print(spec.residual)

# %% [markdown]
"""## Check that acting equals training

Agents act step by step, with cached keys and values, and are trained on segments. Both have to give the
same outputs. Every technique of rlxf passes this test in double precision.
"""

# %%
LENGTH = 40
model = spec.build().double()
x, index = torch.randn(1, LENGTH, spec.width, dtype=torch.float64), TokenIndex.range(1, LENGTH)
with torch.no_grad():
    trained = model.outputs(x, index)
    cache = model.cache(model.initial_state(1), LENGTH)
    steps = [TokenIndex(index.position[:, [t]], index.episode[:, [t]]) for t in range(LENGTH)]
    acted = torch.stack([model.step(x[:, t], steps[t], cache)[0] for t in range(LENGTH)], dim=1)
print("equal:", bool((acted - trained).abs().max() < 1e-10))

# %% [markdown]
"""## Train an agent with it"""

# %%
from rlxf.envs import make_vec_env

env = make_vec_env("rlxf/TMaze-v0", n_envs=32, seed=0, env_kwargs={"corridor_length": 10})
agent = GTrXLPPO("MlpGTrXLPolicy", env, core=spec, segment_length=16, n_steps=16, batch_size=128, seed=0)
agent.learn(TIMESTEPS)
print(evaluate(agent, env, episodes=EPISODES))

# %% [markdown]
"""With the sizes above, which took half a minute on one core, the agent succeeded in all episodes. Each scale
was 0.1 before training; afterwards the means were between 0.115 and 0.13.
"""

# %%
for name, module in agent.policy.named_modules():
    if isinstance(module, ScaledSum):
        print(f"{name}: mean scale {module.scale.mean().item():.3f}")
