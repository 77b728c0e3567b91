"""Running sums of keys and values of linear attention, and their chunked scan over a segment."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.autograd import first_derivative_only

LOWEST_SCALE = -1e30
"""Scale of absent keys: in a sum with any other key, their contribution is 0."""


class KeyFeatures(NamedTuple):
    """Features of keys (B, H, T, M), times e^scale (B, H, T); no gradient flows through the scale."""

    features: Tensor
    scale: Tensor

    @property
    def energy(self) -> Tensor:
        """Squared norms ``|phi(k_j)|^2`` divided by ``e^(2 scale)``, (B, H, T, 1)."""
        return self.features.square().sum(-1, keepdim=True)

    def exclude(self, excluded: Tensor) -> "KeyFeatures":
        """Exclude the keys for which ``excluded`` (B, T) is True; their values must be 0."""
        return KeyFeatures(self.features, self.scale.masked_fill(excluded[:, None], LOWEST_SCALE))


class KVState(NamedTuple):
    """Key-value state ``sum_j phi(k_j) [v_j, 1]``: total (B, H, M, V + 1), times e^scale (B, H).

    ``energy`` (B, H, 1, 1), times e^(2 scale), is ``sum_j |phi(k_j)|^2``. `RFA` estimates the noise of
    its denominator from it.
    """

    total: Tensor
    scale: Tensor
    energy: Tensor

    @classmethod
    def empty(cls, features: int, values: Tensor) -> "KVState":
        """Return the state of no keys, for M features and values (B, H, T, V + 1)."""
        batch, heads, _, size = values.shape
        total = values.new_zeros(batch, heads, features, size)
        return cls(total, values.new_full((batch, heads), LOWEST_SCALE), values.new_zeros(batch, heads, 1, 1))

    def add(self, keys: KeyFeatures, values: Tensor) -> "KVState":
        """Return the state with additional keys and their values (B, H, T, V + 1)."""
        scale = torch.cat([self.scale[..., None], keys.scale], dim=-1).amax(-1)
        kept, joined = self.rescaled(keys, scale)
        energy = kept.square() * self.energy + joined.square().mT @ keys.energy
        return KVState(kept * self.total + keys.features.mT @ (joined * values), scale, energy)

    def decayed(self, log_decay: Tensor, reset: Tensor) -> "KVState":
        """Return the state times e^log_decay (B, H); it is empty in the rows ``reset`` (B,) bool."""
        scale = (self.scale + log_decay).to(self.scale.dtype).masked_fill(reset[:, None], LOWEST_SCALE)
        cleared = reset[:, None, None, None]
        return KVState(self.total.masked_fill(cleared, 0.0), scale, self.energy.masked_fill(cleared, 0.0))

    def rescaled(self, keys: KeyFeatures, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors that bring this state (B, H, 1, 1) and keys (B, H, T, 1) to a scale (B, H)."""
        kept, joined = self.scale - scale, keys.scale - scale[..., None]
        return kept.exp()[..., None, None], joined.exp()[..., None]


def pairwise_sums(queries: Tensor, keys: KeyFeatures, values: Tensor, allowed: Tensor) -> Tensor:
    """Compute ``sum_j phi(q_i) . phi(k_j) [v_j, 1]`` and ``sum_j |phi(k_j)|^2``.

    They are divided by e^s and e^(2 s), with s the largest scale among the keys of query i.

    Args:
        queries: features (B, H, Tq, M).
        keys: features of Tk keys.
        values: values with an appended 1, (B, H, Tk, V + 1).
        allowed: attention mask (B, 1 or H, Tq, Tk) bool, True where a query may attend to a key.

    Returns:
        (B, H, Tq, V + 2); 0 for a query without visible keys.
    """
    scale = keys.scale[:, :, None].masked_fill(~allowed, -torch.inf)
    factor = (scale - scale.amax(-1, keepdim=True).clamp(min=LOWEST_SCALE)).exp()
    result = (queries @ keys.features.mT * factor) @ values
    return torch.cat([result, factor.square() @ keys.energy], dim=-1)


def chunk_sums(
    queries: Tensor, keys: KeyFeatures, values: Tensor, before: KVState, allowed: Tensor, continues: Tensor
) -> Tensor:
    """Compute `pairwise_sums` where queries may also attend to the keys of a state.

    Args:
        queries: features (B, H, T, M).
        keys: features of T keys.
        values: values with an appended 1, (B, H, T, V + 1); 0 in empty slots.
        before: state of the keys before the chunk.
        allowed: attention mask (B, 1, T, T) bool.
        continues: (B, T) bool, true for queries that attend to the state.

    Returns:
        (B, H, T, V + 2).
    """
    scale = keys.scale[:, :, None].masked_fill(~allowed, -torch.inf)
    past = before.scale[..., None].masked_fill(~continues[:, None], -torch.inf)
    top = torch.maximum(scale.amax(-1), past).clamp(min=LOWEST_SCALE).detach()[..., None]
    factor, kept = (scale - top).exp(), (past[..., None] - top).exp()
    weights = queries @ keys.features.mT * factor
    result = weights @ values + kept * (queries @ before.total)
    return torch.cat([result, factor.square() @ keys.energy + kept.square() * before.energy], dim=-1)


def causal_sums(queries: Tensor, keys: KeyFeatures, values: Tensor, before: KVState) -> tuple[Tensor, Tensor]:
    """Compute `pairwise_sums` where each of T queries attends to the state before and the keys up to its own.

    Returns:
        (B, H, T, V + 2), and the weights of the T^2 pairs, (B, H, T, T).
    """
    past, pairs = causal_factors(keys, before)
    energy = pairs.square() @ keys.energy + past.square() * before.energy
    weights = pairs.mul_(queries @ keys.features.mT)
    result = weights @ values + past * (queries @ before.total)
    return torch.cat([result, energy], dim=-1), weights


def causal_factors(keys: KeyFeatures, before: KVState) -> tuple[Tensor, Tensor]:
    """Return the factors of the state (B, H, T, 1) and of T keys (B, H, T, T) for T queries."""
    largest = keys.scale.cummax(-1).values if keys.scale.shape[-1] > 1 else keys.scale
    top = torch.maximum(largest, before.scale[..., None])
    past = before.scale[..., None] - top
    pairs = (keys.scale[..., None, :] - top[..., None]).clamp_(max=0)  # later keys might overflow
    return past.exp()[..., None], pairs.exp_().tril_()


def append_ones(v: Tensor) -> Tensor:
    """Append a 1, which sums to the denominator, to values (B, H, T, V): (B, H, T, V + 1)."""
    return F.pad(v, (0, 1), value=1.0)


class FeatureMap(Protocol):
    """Feature maps of queries and keys; see `LinearAttention`."""

    def query_features(self, q: Tensor) -> Tensor: ...

    def key_features(self, k: Tensor) -> KeyFeatures: ...

    def parameters(self) -> Any: ...


def scan_chunk(
    kernel: FeatureMap, q: Tensor, k: Tensor, values: Tensor, empty: Tensor, before: KVState
) -> tuple[Tensor, KVState]:
    """Attend from T queries to the state and to the keys up to their own, and update the state.

    The arguments and the T^2 weights are stored for the backward pass, which recomputes the larger features.

    Args:
        kernel: computes the features.
        q: (B, H, T, D + E).
        k: (B, H, T, D + F).
        values: values with an appended 1, (B, H, T, V + 1); 0 in empty slots.
        empty: (B, T) bool.
        before: state of all earlier keys.

    Returns:
        The result of `causal_sums`, and the state that includes these keys.
    """
    result, *after = _ChunkScan.apply(kernel, q, k, values, empty, *before, *kernel.parameters())  # type: ignore
    return result, KVState(*after)


class _ChunkScan(torch.autograd.Function):
    """`scan_chunk`, with a backward pass that stores less than torch's automatic differentiation would."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: FeatureMap,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        empty: Tensor,
        total: Tensor,
        scale: Tensor,
        energy: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        before = KVState(total, scale, energy)
        keys = kernel.key_features(k).exclude(empty)
        after = before.add(keys, values)
        ctx.kernel = kernel
        result, weights = causal_sums(kernel.query_features(q), keys, values, before)
        ctx.save_for_backward(q, k, values, empty, weights, *before, after.scale, *parameters)
        ctx.mark_non_differentiable(after.scale)
        return result, *after

    @staticmethod
    @first_derivative_only("causal linear attention (Performer, RFA)")
    def backward(
        ctx: Any, grad_result: Tensor, grad_total: Tensor, _: Tensor, grad_energy: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, values, empty, weights, total, scale, energy, end, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            queries, keys = ctx.kernel.query_features(q), ctx.kernel.key_features(k)
        detached_keys = KeyFeatures(keys.features.detach(), keys.scale).exclude(empty)
        before, grad_after = KVState(total, scale, energy), KVState(grad_total, end, grad_energy)
        grad_queries, grad_keys, grad_values, grad_total, grad_energy = _gradients(
            queries.detach(), detached_keys, values, weights, before, grad_result, grad_after
        )
        grad_inputs = torch.autograd.grad(
            (queries, keys.features), (q, k, *parameters), (grad_queries, grad_keys), allow_unused=True
        )
        return None, *grad_inputs[:2], grad_values, None, grad_total, None, grad_energy, *grad_inputs[2:]


def _gradients(
    queries: Tensor,
    keys: KeyFeatures,
    values: Tensor,
    weights: Tensor,
    before: KVState,
    grad_result: Tensor,
    grad_after: KVState,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, and of total and energy of the state before.

    They follow from the gradients of the result and of the state after the keys, at the scale of that state:
    ``result = weights V + past * Q S``, ``weights = pairs * Q K^T``, ``after = kept * S + K^T (joined * V)``.
    Energies depend in the same way on the squared norms of keys, with squared factors.
    """
    past, pairs = causal_factors(keys, before)
    kept, joined = before.rescaled(keys, grad_after.scale)
    grad_result, grad_energy = grad_result[..., :-1], grad_result[..., -1:]
    grad_norms = pairs.square().mT @ grad_energy + joined.square() * grad_after.energy
    grad_energy = (past.square() * grad_energy).sum(-2, keepdim=True) + kept.square() * grad_after.energy
    grad_products, grad_past = pairs.mul_(grad_result @ values.mT), past * grad_result
    grad_keys = torch.baddbmm(*_flat(grad_products.mT @ queries, joined * values, grad_after.total.mT))
    return (
        torch.baddbmm(*_flat(grad_products @ keys.features, grad_past, before.total.mT)).view_as(queries),
        torch.addcmul(grad_keys.view_as(queries), keys.features, grad_norms, value=2),
        weights.mT @ grad_result + joined * (keys.features @ grad_after.total),
        kept * grad_after.total + queries.mT @ grad_past,
        grad_energy,
    )


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Merge batch and heads of each tensor: (B, H, ...) -> (B H, ...)."""
    return tuple(x.flatten(0, 1) for x in tensors)
