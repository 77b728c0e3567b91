"""How fast an agent could be: operations that must be done, over the rate at which matrices multiply."""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.shapes import Shape

MATRICES = ((1024, 384, 384), (2048, 384, 1152), (4096, 512, 512), (2048, 1024, 1024), (4096, 1024, 1024))
"""(n, k, m) of the products timed: from a minibatch's projection to what keeps every core busy."""


def multiply_adds_per_step(shape: Shape) -> float:
    r"""Multiply-adds that one environment step costs, acting and learning together.

    A token takes, in each of L layers,

        ``token = 4 C^2 + 2 C F + 3 (M + 1) C + [gated] 12 C^2``:

    projections of q, k, v and the output; feed-forward; content score, position score and
    weighted sum over the M + 1 tokens it sees; two GRU gates of six matrices each. Keys and values
    of M remembered tokens are projected anew, ``memory = 2 C^2 M``: once a segment of T in each pass,
    once a rollout of S to act. Backward costs twice forward, but of memory only once: no gradient goes
    into it. With N epochs

        ``L (token + memory / S  +  N (3 token + 2 memory / T))``.

    Left out, so that the floor is a floor: observations, heads, the distances' table, everything that is
    not a matrix product, and scores that a dense segment computes and masks.
    """
    C, F, M = shape.width, shape.feed_forward, shape.memory
    token = 4 * C**2 + 2 * C * F + 3 * (M + 1) * C + shape.gated * 12 * C**2
    memory = 2 * C**2 * M
    acting = token + memory / shape.steps
    learning = shape.epochs * (3 * token + 2 * memory / shape.segment)
    return shape.layers * (acting + learning)


def steps_per_second_at_most(shape: Shape, rate: float) -> float:
    """Environment steps per second at ``rate`` operations per second; a multiply-add is two of them."""
    return rate / (2 * multiply_adds_per_step(shape))


def matrix_rate(matrices: Sequence[tuple[int, int, int]] = MATRICES, seconds: float = 0.5) -> float:
    """Highest rate of float32 matrix products, operations per second, with torch's present threads.

    Each product (n, k) x (k, m) is repeated for ``seconds``; 2 n k m operations over its fastest run.
    """
    return max(2 * n * k * m / fastest(product(n, k, m), seconds) for n, k, m in matrices)


def product(n: int, k: int, m: int) -> Callable[[], object]:
    """A call that multiplies (n, k) by (k, m) into memory it keeps."""
    a, b, c = torch.rand(n, k), torch.rand(k, m), torch.empty(n, m)
    return lambda: torch.mm(a, b, out=c)


def fastest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the calls that fit in ``seconds``."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
