"""GTrXLPPO with the sizes of a shape."""

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from benchmarks.shapes import Shape
from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.attention import Add, GRUGate

FEWER_UPDATES: dict[str, Any] = {"n_steps": 64, "batch_size": 512, "n_epochs": 3}
"""Settings with a quarter of the default number of optimizer steps, used by the benchmarks of techniques."""


def gtrxl_ppo(env: VecEnv, shape: Shape, **options: Any) -> GTrXLPPO:
    """Build a GTrXLPPO with the sizes of a shape; other settings are its defaults or from ``options``."""
    core = gtrxl(
        shape.memory,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        feed_forward=shape.feed_forward,
        residual=GRUGate(bias=2.0) if shape.gated else Add(),
    )
    sizes: dict[str, Any] = {
        "n_steps": shape.steps,
        "segment_length": shape.segment,
        "batch_size": shape.minibatch,
        "n_epochs": shape.epochs,
    }
    return GTrXLPPO("MlpGTrXLPolicy", env, core=core, **(sizes | options))


def gathered_bytes(shape: Shape) -> int:
    """Return the bytes of memories gathered for one minibatch: M steps before each segment of T steps."""
    segments = shape.minibatch // shape.segment
    return 4 * segments * shape.memory * shape.layers * shape.width
