"""Lower precision of matrix products with weights; everything else keeps the dtype of the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

P = ParamSpec("P")
Result = TypeVar("Result")
_dtype: ContextVar[torch.dtype | None] = ContextVar("dtype of matrix products", default=None)


@contextmanager
def matmul_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Compute matrix products with weights in another dtype within this context.

    These are the projections of attention, feed-forward networks and gates. Their results are cast back to
    the dtype of their input, except between the two products of a feed-forward network. Norms, the residual
    stream, scores, softmax, position encodings, all kernels and recurrences are not affected, unlike with
    ``torch.autocast``, which also casts products of scores, states and gates that need more digits. Weights
    and their gradients keep their dtype.

    Args:
        dtype: dtype of matrix products, e.g. ``torch.bfloat16``; None for that of the weights.
    """
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def cast(x: Tensor) -> Tensor:
    """Return an operand of a matrix product in the dtype of `matmul_dtype`; x itself outside of it."""
    dtype = _dtype.get()
    return x if dtype is None else x.to(dtype)


def mixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + b`` in the dtype of `matmul_dtype`, and return it in the dtype of x.

    Args:
        x: (..., C).
        weight: W, (F, C).
        bias: b, (F,); None for none.
    """
    if _dtype.get() is None:
        return F.linear(x, weight, bias)
    return F.linear(cast(x), cast(weight), None if bias is None else cast(bias)).to(x.dtype)


def keep_matmul_dtype(function: Callable[P, Result]) -> Callable[P, Result]:
    """Bind the current `matmul_dtype` to a function that backward calls again, outside of the context."""
    dtype = _dtype.get()

    @wraps(function)
    def bound(*args: P.args, **kwargs: P.kwargs) -> Result:
        with matmul_dtype(dtype):
            return function(*args, **kwargs)

    return function if dtype is None else bound
