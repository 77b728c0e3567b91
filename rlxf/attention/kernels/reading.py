"""A chunk of tokens reads what was before and itself, with a gradient that keeps little."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlxf.attention.kernels.sums import Keys, Sums, over_past, seen


class Features(Protocol):
    """What makes features of queries and keys; see `LinearAttention`."""

    def asking(self, q: Tensor) -> Tensor: ...

    def heard(self, k: Tensor) -> Keys: ...

    def parameters(self) -> Any: ...


def read(
    kernel: Features, q: Tensor, k: Tensor, values: Tensor, empty: Tensor, before: Sums
) -> tuple[Tensor, Sums]:
    """What T queries find in the sums before and in the keys up to their own, and the sums behind them.

    The arguments and the T^2 weights are kept for the gradient; features, which are more, are found again.

    Args:
        kernel: makes the features.
        q: (B, H, T, D + E).
        k: (B, H, T, D + F).
        values: with a 1 behind them, (B, H, T, V + 1); 0 in empty slots.
        empty: (B, T) bool.
        before: sums over all keys before.

    Returns:
        As `over_past`, and the sums with these keys.
    """
    found, *after = _Read.apply(kernel, q, k, values, empty, *before, *kernel.parameters())  # type: ignore
    return found, Sums(*after)


class _Read(torch.autograd.Function):
    """`read`. torch's own gradient would keep several times as much."""

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
        found, weights = over_past(kernel.asking(q), keys, values, before)
        ctx.save_for_backward(q, k, values, empty, weights, *before, after.scale, *parameters)
        ctx.mark_non_differentiable(after.scale)
        return found, *after

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_found: Tensor, of_total: Tensor, _: Tensor, of_energy: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, values, empty, weights, total, scale, energy, end, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            queries, keys = ctx.kernel.asking(q), ctx.kernel.heard(k)
        known = Keys(keys.features.detach(), keys.scale).without(empty)
        before = Sums(total, scale, energy)
        of_norms, of_energy = _energy_gradients(known, before, end, of_found[..., -1:], of_energy)
        of_queries, of_keys, of_values, of_total = _gradients(
            queries.detach(), known, values, weights, before, end, of_found[..., :-1], of_total
        )
        of_keys = torch.addcmul(of_keys, known.features, of_norms, value=2)
        of_inputs = torch.autograd.grad(
            (queries, keys.features), (q, k, *parameters), (of_queries, of_keys), allow_unused=True
        )
        return None, *of_inputs[:2], of_values, None, of_total, None, of_energy, *of_inputs[2:]


def _gradients(
    queries: Tensor,
    keys: Keys,
    values: Tensor,
    weights: Tensor,
    before: Sums,
    end: Tensor,
    of_found: Tensor,
    of_after: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of queries, keys, values and the sums before, from those of what was found and of the sums after.

    ``found = weights V + past * Q S``, ``weights = pairs * Q K^T``, ``after = kept * S + K^T (joined * V)``.
    """
    past, pairs = seen(keys, before)
    kept, joined = before.rescaled(keys, end)
    of_products, of_past = pairs.mul_(of_found @ values.mT), past * of_found
    return (
        torch.baddbmm(*_flat(of_products @ keys.features, of_past, before.total.mT)).view_as(queries),
        torch.baddbmm(*_flat(of_products.mT @ queries, joined * values, of_after.mT)).view_as(queries),
        weights.mT @ of_found + joined * (keys.features @ of_after),
        kept * of_after + queries.mT @ of_past,
    )


def _energy_gradients(
    keys: Keys, before: Sums, end: Tensor, of_found: Tensor, of_after: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the squared norms of keys (B, H, T, 1) and of the energy before.

    They are computed from the gradients of the energy that was found and of the energy after.
    """
    past, pairs = (factor.square() for factor in seen(keys, before))
    kept, joined = (factor.square() for factor in before.rescaled(keys, end))
    of_norms = pairs.mT @ of_found + joined * of_after
    return of_norms, (past * of_found).sum(-2, keepdim=True) + kept * of_after


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, H, ...) -> (B H, ...) each."""
    return tuple(x.flatten(0, 1) for x in tensors)
