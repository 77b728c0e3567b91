"""Upper bound of throughput: required operations over the measured rate of matrix products."""

from collections.abc import Callable

import torch

from benchmarks.machine import is_cuda, now
from benchmarks.shapes import Shape
from rlxf.utils.matrix_products import SMALLEST, float32_products

MATRICES = ((1024, 384, 384), (2048, 384, 1152), (4096, 512, 512), (2048, 1024, 1024), (4096, 1024, 1024))
"""Timed products (n, k, m): from the projection of a minibatch to sizes that occupy all cores."""
CUDA_MATRICES = (*MATRICES, (8192, 4096, 4096), (8192, 8192, 8192))
"""Timed products on a GPU, which also requires larger ones."""


def multiply_adds_per_step(shape: Shape) -> float:
    r"""Return the multiply-adds per environment step, for acting and learning together.

    A token needs, in each of L layers,

        ``token = 4 C^2 + 2 C F + 3 (M + 1) C + [gated] 12 C^2``:

    for projections of q, k, v and the output; feed-forward; content score, position score and
    weighted sum over M + 1 tokens; two GRU gates of six matrices each. Keys and values of M memory tokens
    are projected again, ``memory = 2 C^2 M``: per segment of T steps in each forward pass of learning, and
    per rollout of S steps in acting. A backward pass costs twice a forward pass, but for memory tokens only
    once, as they receive no gradient. With N epochs

        ``L (token + memory / S  +  N (3 token + 2 memory / T))``.

    Not counted, so that the result is a lower bound: observation encoders, output heads, relative position
    embeddings, operations other than matrix products, and masked scores of dense segments.
    """
    C, F, M = shape.width, shape.feed_forward, shape.memory
    token = 4 * C**2 + 2 * C * F + 3 * (M + 1) * C + shape.gated * 12 * C**2
    memory = 2 * C**2 * M
    acting = token + memory / shape.steps
    learning = shape.epochs * (3 * token + 2 * memory / shape.segment)
    return shape.layers * (acting + learning)


def steps_per_second_at_most(shape: Shape, rate: float) -> float:
    """Return environment steps per second at ``rate`` operations per second; a multiply-add counts as two."""
    return rate / (2 * multiply_adds_per_step(shape))


def matrix_rate(device: str = "cpu") -> float:
    """Return the highest rate of float32 matrix products in operations per second, as updates compute them.

    On a CPU, these are the products of `float32_products`. Other settings are those of torch: the number of
    threads, and on a GPU float32 without TF32 by default.
    """
    with float32_products(SMALLEST, device):
        return torch_matrix_rate(device)


def torch_matrix_rate(device: str = "cpu") -> float:
    """Return the highest rate of float32 matrix products in operations per second, with torch's settings.

    Each product (n, k) x (k, m) is repeated for half a second; the rate is 2 n k m over its shortest time.
    """
    matrices = CUDA_MATRICES if is_cuda(device) else MATRICES
    return max(2 * n * k * m / fastest(product(n, k, m, device), 0.5, device) for n, k, m in matrices)


def product(n: int, k: int, m: int, device: str) -> Callable[[], object]:
    """Return a function that multiplies (n, k) by (k, m) into a preallocated tensor."""
    a, b = torch.rand(n, k, device=device), torch.rand(k, m, device=device)
    c = torch.empty(n, m, device=device)
    return lambda: torch.mm(a, b, out=c)


def fastest(call: Callable[[], object], seconds: float, device: str) -> float:
    """Return the shortest time of a call on a device, in seconds, over repeated calls for ``seconds``."""
    best, start = float("inf"), now(device)
    end = start + seconds
    while start < end:
        call()
        after = now(device)
        best, start = min(best, after - start), after
    return best
