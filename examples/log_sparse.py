"""Your own attention technique: the pattern of the LogSparse Transformer, registered from outside of rlxf.

    python log_sparse.py

With the registration, specs, checkpoints and options of this process know the pattern by its name. The
program extended_rlxf.py is the command `rlxf` with this pattern.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from signal_task import SMALL, TASK
from torch import Tensor

from rlxf import GTrXLPPO, TransformerSpec, evaluate
from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import TokenIndex, register_technique
from rlxf.attention.patterns.base import Pattern
from rlxf.envs import make_vec_env
from rlxf.evaluation import Report
from rlxf.utils.checks import check_int


@register_technique("pattern")  # refuses a name that the axis already has
@dataclass(frozen=True)
class LogSparse(Pattern):
    """Query i attends to key j if ``|i - j|`` is 0 or a power of two, up to ``reach``.

    A query attends to about ``log2(reach)`` keys. In a transformer of n layers, it receives information from
    every token whose distance is a sum of at most n powers of two.

    Source: Li et al. 2019, arXiv:1907.00235, section 4.2.

    Args:
        reach: largest distance in tokens, at least 1.

    Raises:
        TypeError: if reach is not an integer.
        ValueError: if reach is less than 1.
    """

    # `rlxf techniques log-sparse` prints these three.
    paper: ClassVar[str] = "Li et al. 2019, arXiv:1907.00235"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L log(reach) pairs"
    # Options need a default and a type that JSON has. They are options of the command line, too.
    reach: int = 128

    shift_period = 1  # the rule depends on distances only, so layouts of sparse execution can be reused

    def __post_init__(self) -> None:
        check_int("LogSparse reach", self.reach)  # values may come from a file or from the command line

    @property
    def max_distance(self) -> int:
        """Agents compare it with the length of the memory."""
        return self.reach

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the rule for broadcast positions in the episode. The transformer itself hides later keys."""
        distance = (i - j).abs()
        return (distance & (distance - 1) == 0) & (distance <= self.reach)


def largest_difference(spec: TransformerSpec, length: int = 40) -> float:
    """Return how much acting, step by step with a cache, differs from training on the whole segment.

    Every technique has to pass this test: agents act with `step` and are trained with segments.
    """
    model = spec.build().double()
    x, index = torch.randn(1, length, spec.width, dtype=torch.float64), TokenIndex.range(1, length)
    trained = model.outputs(x, index)
    cache = model.cache(model.initial_state(1), length)
    steps = [TokenIndex(index.position[:, [t]], index.episode[:, [t]]) for t in range(length)]
    acted = torch.stack([model.step(x[:, t], steps[t], cache)[0] for t in range(length)], dim=1)
    return float((acted - trained).detach().abs().max())


def sparse_core() -> TransformerSpec:
    """Return a GTrXL with the pattern. The pattern may not reach farther back than the memory."""
    return replace(gtrxl(memory_length=16), pattern=LogSparse(reach=16))


def train(steps: int = 10_240, seed: int = 0) -> Report:
    """Train an agent with the pattern in the task of signal_task.py, and return its evaluation."""
    env = make_vec_env(TASK, n_envs=32, seed=seed)
    settings = {name: value for name, value in SMALL.items() if name != "memory_length"}  # the core has it
    agent = GTrXLPPO("MlpGTrXLPolicy", env, core=sparse_core(), seed=seed, **settings)
    agent.learn(steps, progress_bar=True)
    return evaluate(agent, TASK, episodes=200)


def main() -> None:
    """Compare acting with training, and train an agent."""
    spec = sparse_core()
    assert TransformerSpec.from_json(spec.to_json()) == spec  # as in a checkpoint
    print(f"acting and training differ by at most {largest_difference(spec):.0e}")
    print(train())


if __name__ == "__main__":
    main()
