"""Linear maps: the dtype of their products, their initialization, and forms of modules with few calls."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

P = ParamSpec("P")
Result = TypeVar("Result")
_dtype: ContextVar[torch.dtype | None] = ContextVar("dtype of matrix products", default=None)
TokenFunction = Callable[..., Tensor]
"""Function of tokens (B, C), such as a module."""


class Hooks(NamedTuple):
    """Tables of hooks: those for the calls of all modules, and a function that returns those of a module."""

    shared: tuple[dict[int, Any], ...]
    of: Callable[[nn.Module], tuple[dict[int, Any], ...]]


FORWARD_HOOKS = Hooks(
    (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks),
    attrgetter("_forward_hooks", "_forward_pre_hooks"),
)
"""Hooks of the forward pass."""
ALL_HOOKS = Hooks(
    (*FORWARD_HOOKS.shared, torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks),
    attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
"""Hooks of the forward and of the backward pass."""


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


def current_matmul_dtype() -> torch.dtype | None:
    """Return the dtype of `matmul_dtype`; None outside of it."""
    return _dtype.get()


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
    def with_dtype(*args: P.args, **kwargs: P.kwargs) -> Result:
        with matmul_dtype(dtype):
            return function(*args, **kwargs)

    return function if dtype is None else with_dtype


class Linear(nn.Linear):
    """``nn.Linear`` whose product has the dtype of `matmul_dtype`."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``W x + b`` for x (..., C)."""
        return mixed_linear(x, self.weight, self.bias)

    def bind(self) -> TokenFunction:
        """Return the product in the dtype of the weights as a `bound` function."""
        return partial(F.linear, weight=self.weight, bias=self.bias)


def is_patched(module: nn.Module, hooks: Hooks = ALL_HOOKS) -> bool:
    """Return whether calls of a module do more than its class defines.

    They do if hooks are registered for this module or for all modules, or if the instance has its own
    ``forward``, other than that of TorchScript. Such a module has to be called: its parameters must not be
    read instead.
    """
    if any(hooks.of(module)) or any(hooks.shared):
        return True
    return "forward" in module.__dict__ and not isinstance(module, torch.jit.ScriptModule)


class PatchSearch:
    """Search for patched modules (`is_patched`) among given ones, which takes microseconds for all of them.

    Args:
        modules: the modules.
        hooks: hooks that count.
    """

    def __init__(self, modules: Iterable[nn.Module], hooks: Hooks = ALL_HOOKS):
        modules = list(modules)
        self._hooks = [*hooks.shared, *chain.from_iterable(map(hooks.of, modules))]
        self._attributes = [vars(each) for each in modules if not isinstance(each, torch.jit.ScriptModule)]

    def finds_any(self) -> bool:
        """Return whether one of the modules is patched at present."""
        return any(self._hooks) or any(map(contains, self._attributes, repeat("forward")))


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a `Linear` whose weight and bias may be read instead of a call.

    An adapter that replaces the layer has to be called, and so does a layer that `is_patched`.
    """
    return type(layer) is Linear and not is_patched(layer)


def stacked_orthogonal(matrices: int, rows: int, columns: int) -> nn.Parameter:
    """Create a parameter (matrices * rows, columns) of stacked matrices, each initialized orthogonally.

    torch's default initialization of Linear scales a projection down by sqrt(3), which weakens the
    signal that gated residuals pass to memory. Orthogonal matrices preserve its norm.
    """
    weight = torch.empty(matrices, rows, columns)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight.flatten(0, 1))


def orthogonal_linear(columns: int, rows: int, matrices: int = 1, bias: bool = True) -> Linear:
    """Create a `Linear` of ``matrices`` stacked projections from ``columns`` to ``rows`` features; bias 0."""
    linear = Linear(columns, matrices * rows, bias=bias)
    linear.weight = stacked_orthogonal(matrices, rows, columns)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def own_method(part: object, name: str) -> Callable[..., Any] | None:
    """Return a method that the class of ``part`` defines itself; None if it is missing or inherited.

    For faster forms of a computation, which do not apply to a subclass that changes the computation.
    """
    return getattr(part, name) if name in vars(type(part)) else None


def fused_step(part: object) -> Any:
    """Return the form of a module for a `FusedStep`: the result of its own method ``fused_step``, or None."""
    method = own_method(part, "fused_step")
    return None if method is None else method()


def bound(module: nn.Module) -> TokenFunction:
    """Return a function of tokens (B, C) that computes the same as the module, with less overhead per call.

    It uses the current parameter objects of the module and calls no hooks. The class of a module may define
    it in a method ``bind``; otherwise it is the module.
    """
    bind = own_method(module, "bind")
    return module if bind is None else bind()
