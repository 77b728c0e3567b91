"""Online softmax over keys that a query sees in several block groups, without all scores at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlxf.attention.sparse.layout import BlockGroup

LOG_ZERO = -1e30
"""Logarithm of a weight of 0; with -inf, differences would be nan."""

PAIRS_PER_STEP = 1 << 18
"""Number of pairs whose scores are computed at a time; they fit a processor's cache."""


def online_softmax(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[BlockGroup]) -> tuple[Tensor, Tensor]:
    """Compute ``o_i = sum exp(s_ij) v_j / sum exp(s_ij)`` over the pairs of all parts; 0 without keys.

    Pairs that are in two parts count twice. Scores are ``q_i . k_j / sqrt(D)``. The backward pass recomputes
    them instead of storing them: memory grows with L, not with the number of pairs.

    Source: the merging of partial softmaxes is that of Dao et al. 2022, arXiv:2205.14135, section 3.1.

    Args:
        q: (B, H, Tq, D).
        k: (B, H, Tk, D).
        v: (B, H, Tk, V).
        parts: slots index the flattened (B H Tq) queries and (B H Tk) keys. Padding is slot (B H Tq) for a
            query, and any slot for a key.

    Returns:
        o, (B, H, Tq, V), and whether a query sees any key, (B, H, Tq, 1) bool.
    """
    queries, keys, values = (x.flatten(0, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    output, seen = _OnlineSoftmax.apply(queries, keys, values, parts)  # type: ignore[no-untyped-call]
    return output.unflatten(0, q.shape[:3]), seen.view(*q.shape[:3], 1)


class _OnlineSoftmax(torch.autograd.Function):
    """Autograd function of `online_softmax` over rows. An additional row stands for padding."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[BlockGroup]
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        q = _padded(q)
        out = q.new_zeros(len(q), v.shape[1], dtype=wide)
        total = q.new_full((len(q),), LOG_ZERO, dtype=wide)
        for part in _slabs(parts):
            scores = _scores(F.embedding(part.query, q), F.embedding(part.key, k), part)
            top = scores.amax(-1, keepdim=True).clamp(min=LOG_ZERO)
            weights = scores.sub_(top).exp_()
            partial = torch.bmm(weights, F.embedding(part.key, v))
            _merge(out, total, part.query.flatten(), partial.flatten(0, 1), weights.sum(-1), top)
        seen = total[:-1] > LOG_ZERO / 2
        ctx.save_for_backward(q, k, v, out, total)
        ctx.parts = parts
        ctx.mark_non_differentiable(seen)
        return out[:-1].to(v.dtype), seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        grad_out = _padded(grad_out)
        inner = (grad_out * out).sum(-1).to(q.dtype)
        total = total.to(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        for part in _slabs(ctx.parts):
            queries, keys = F.embedding(part.query, q), F.embedding(part.key, k)
            grad = F.embedding(part.query, grad_out)
            weights = _scores(queries, keys, part).sub_(total[part.query][..., None]).exp_()
            grad_scores = torch.bmm(grad, F.embedding(part.key, v).transpose(1, 2))
            grad_scores = grad_scores.sub_(inner[part.query][..., None]).mul_(weights)
            _add(grad_v, part.key, torch.bmm(weights.transpose(1, 2), grad))
            _add(grad_q, part.query, torch.bmm(grad_scores, keys))
            _add(grad_k, part.key, torch.bmm(grad_scores.transpose(1, 2), queries))
        return grad_q[:-1].to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _padded(x: Tensor) -> Tensor:
    """Append a row of zeros to x (N, D)."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _slabs(parts: Sequence[BlockGroup]) -> Iterator[BlockGroup]:
    """Yield the parts in groups of at most `PAIRS_PER_STEP` pairs."""
    for part in parts:
        groups, queries = part.query.shape
        size = max(1, PAIRS_PER_STEP // (queries * part.key.shape[1]))
        for start in range(0, groups, size):
            yield part.at(slice(start, start + size))


def _scores(queries: Tensor, keys: Tensor, part: BlockGroup) -> Tensor:
    """Return the scores (P, G, K) of queries (P, G, D) and keys (P, K, D), -inf for masked pairs."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    return scores.masked_fill_(~part.allowed, -torch.inf)


def _add(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Add values (P, G, D) to the rows (N, D) at slots (P, G), in place."""
    rows.index_add_(0, slots.flatten(), values.flatten(0, 1).to(rows.dtype))


def _merge(out: Tensor, total: Tensor, slots: Tensor, partial: Tensor, weight: Tensor, top: Tensor) -> None:
    """Merge partial averages into the averages of their queries, in place.

    Args:
        out: averages (N, V).
        total: logarithm of the sum of all weights so far (N,).
        slots: slots of the queries (M,).
        partial: sum of ``exp(s - top) v`` (M, V).
        weight: sum of ``exp(s - top)``, M numbers.
        top: largest score, or `LOG_ZERO`: M numbers.
    """
    before, top = total[slots], top.flatten().to(total.dtype)
    after = torch.logaddexp(before, (top + weight.flatten().log()).clamp(min=LOG_ZERO))
    total.index_copy_(0, slots, after)
    old = out.index_select(0, slots).mul_((before - after).exp_()[:, None])
    out.index_copy_(0, slots, old.addcmul_(partial.to(out.dtype), (top - after).exp_()[:, None]))
