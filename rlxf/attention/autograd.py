"""Backward passes of autograd functions without second derivatives."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative_only(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a ``backward`` of a ``torch.autograd.Function`` whose result cannot be differentiated.

    torch's decorator for this purpose raises an error only where ``Tensor.backward`` reaches the node.
    ``torch.autograd.grad`` of a gradient, with respect to parameters, leaves out the terms of such a node
    without an error, so Hessian-vector products would be wrong.

    Args:
        name: what has no second derivatives, for the error.

    Raises:
        RuntimeError: from the decorated function, if it is called for ``create_graph=True``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"second derivatives of {name} are not available: differentiate with create_graph=False, "
                    f"or use a core without this technique"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate
