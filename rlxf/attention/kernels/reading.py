"""Causal attention of a chunk of tokens over a running state, with a backward pass that stores little."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlxf.attention.kernels.sums import Keys, Sums, over_past, seen


class Features(Protocol):
    """Feature maps of queries and keys; see `LinearAttention`."""

    def asking(self, q: Tensor) -> Tensor: ...

    def heard(self, k: Tensor) -> Keys: ...

    def parameters(self) -> Any: ...


def read(
    kernel: Features, q: Tensor, k: Tensor, values: Tensor, empty: Tensor, before: Sums
) -> tuple[Tensor, Sums]:
    """Attend from T queries to the state and to the keys up to their own, and update the state.

    The backward pass stores the arguments and the T^2 weights. It recomputes the features, which are larger.

    Args:
        kernel: computes the features.
        q: (B, H, T, D + E).
        k: (B, H, T, D + F).
        values: values with an appended 1, (B, H, T, V + 1); 0 in empty slots.
        empty: (B, T) bool.
        before: state of all earlier keys.

    Returns:
        The result of `over_past`, and the state that includes these keys.
    """
    result, *after = _Read.apply(kernel, q, k, values, empty, *before, *kernel.parameters())  # type: ignore
    return result, Sums(*after)


class _Read(torch.autograd.Function):
    """Autograd function of `read`. The gradient of torch would store several times as much."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Features,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        empty: Tensor,
        total: Tensor,
        scale: Tensor,
        energy: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        before, keys = Sums(total, scale, energy), kernel.heard(k).without(empty)
        after = before.plus(keys, values)
        ctx.kernel = kernel
        result, weights = over_past(kernel.asking(q), keys, values, before)
        ctx.save_for_backward(q, k, values, empty, weights, *before, after.scale, *parameters)
        ctx.mark_non_differentiable(after.scale)
        return result, *after

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_result: Tensor, grad_total: Tensor, _: Tensor, grad_energy: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, values, empty, weights, total, scale, energy, end, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            queries, keys = ctx.kernel.asking(q), ctx.kernel.heard(k)
        detached_keys = Keys(keys.features.detach(), keys.scale).without(empty)
        before = Sums(total, scale, energy)
        grad_norms, grad_energy = _energy_gradients(
            detached_keys, before, end, grad_result[..., -1:], grad_energy
        )
        grad_queries, grad_keys, grad_values, grad_total = _gradients(
            queries.detach(), detached_keys, values, weights, before, end, grad_result[..., :-1], grad_total
        )
        grad_keys = torch.addcmul(grad_keys, detached_keys.features, grad_norms, value=2)
        grad_inputs = torch.autograd.grad(
            (queries, keys.features), (q, k, *parameters), (grad_queries, grad_keys), allow_unused=True
        )
        return None, *grad_inputs[:2], grad_values, None, grad_total, None, grad_energy, *grad_inputs[2:]


def _gradients(
    queries: Tensor,
    keys: Keys,
    values: Tensor,
    weights: Tensor,
    before: Sums,
    end: Tensor,
    grad_result: Tensor,
    grad_after: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and the state before.

    They follow from the gradients of the result and of the state after: ``result = weights V + past * Q S``,
    ``weights = pairs * Q K^T``, ``after = kept * S + K^T (joined * V)``.
    """
    past, pairs = seen(keys, before)
    kept, joined = before.rescaled(keys, end)
    grad_products, grad_past = pairs.mul_(grad_result @ values.mT), past * grad_result
    return (
        torch.baddbmm(*_flat(grad_products @ keys.features, grad_past, before.total.mT)).view_as(queries),
        torch.baddbmm(*_flat(grad_products.mT @ queries, joined * values, grad_after.mT)).view_as(queries),
        weights.mT @ grad_result + joined * (keys.features @ grad_after),
        kept * grad_after + queries.mT @ grad_past,
    )


def _energy_gradients(
    keys: Keys, before: Sums, end: Tensor, grad_result: Tensor, grad_after: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the squared norms of keys (B, H, T, 1) and of the energy before.

    They are computed from the gradients of the energy in the result and of the energy after.
    """
    past, pairs = (factor.square() for factor in seen(keys, before))
    kept, joined = (factor.square() for factor in before.rescaled(keys, end))
    grad_norms = pairs.mT @ grad_result + joined * grad_after
    return grad_norms, (past * grad_result).sum(-2, keepdim=True) + kept * grad_after


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Merge batch and heads of each tensor: (B, H, ...) -> (B H, ...)."""
    return tuple(x.flatten(0, 1) for x in tensors)
