"""Forms of a module that compute the same with less overhead per call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

TokenFunction = Callable[..., Tensor]
"""Function of tokens (B, C), such as a module."""


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
