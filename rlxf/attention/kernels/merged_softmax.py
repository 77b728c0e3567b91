"""Softmax over keys that a query finds in several places, without all its scores at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlxf.attention.arrangement import Part

NOTHING = -1e30
"""Logarithm of no weight: -inf minus itself would be nan."""

SLAB = 1 << 18
"""Pairs whose scores are held at a time: few enough for a processor's cache."""


def softmax_over_parts(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """``o_i = sum exp(s_ij) v_j / sum exp(s_ij)`` over all pairs that some part shows; 0 if none does.

    Pairs that two parts show count twice. Scores are ``q_i . k_j / sqrt(D)``. They are computed once more for
    the gradient instead of being kept: memory grows with L, not with the pairs.

    Source: the merging of partial softmaxes is that of Dao et al. 2022, arXiv:2205.14135, section 3.1.

    Args:
        q: (B, H, Tq, D).
        k: (B, H, Tk, D).
        v: (B, H, Tk, V).
        parts: slots count through (B H Tq) queries and (B H Tk) keys. Padding is slot (B H Tq) for a query,
            anything for a key.

    Returns:
        o, (B, H, Tq, V), and whether a query sees anything, (B, H, Tq, 1) bool.
    """
    queries, keys, values = (x.flatten(0, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    mixed, seen = _Merged.apply(queries, keys, values, parts)  # type: ignore[no-untyped-call]
    return mixed.unflatten(0, q.shape[:3]), seen.view(*q.shape[:3], 1)


class _Merged(torch.autograd.Function):
    """`softmax_over_parts` of rows. One row more stands for padding."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        q = _padded(q)
        out = q.new_zeros(len(q), v.shape[1], dtype=wide)
        total = q.new_full((len(q),), NOTHING, dtype=wide)
        for part in _slabs(parts):
            scores = _scores(F.embedding(part.query, q), F.embedding(part.key, k), part)
            top = scores.amax(-1, keepdim=True).clamp(min=NOTHING)
            weights = scores.sub_(top).exp_()
            found = torch.bmm(weights, F.embedding(part.key, v))
            _merge(out, total, part.query.flatten(), found.flatten(0, 1), weights.sum(-1), top)
        seen = total[:-1] > NOTHING / 2
        ctx.save_for_backward(q, k, v, out, total)
        ctx.parts = parts
        ctx.mark_non_differentiable(seen)
        return out[:-1].to(v.dtype), seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        gradient = _padded(gradient)
        inner = (gradient * out).sum(-1).to(q.dtype)
        total = total.to(q.dtype)
        of_q, of_k, of_v = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        for part in _slabs(ctx.parts):
            asking, heard = F.embedding(part.query, q), F.embedding(part.key, k)
            arriving = F.embedding(part.query, gradient)
            weights = _scores(asking, heard, part).sub_(total[part.query][..., None]).exp_()
            of_scores = torch.bmm(arriving, F.embedding(part.key, v).transpose(1, 2))
            of_scores = of_scores.sub_(inner[part.query][..., None]).mul_(weights)
            _add(of_v, part.key, torch.bmm(weights.transpose(1, 2), arriving))
            _add(of_q, part.query, torch.bmm(of_scores, heard))
            _add(of_k, part.key, torch.bmm(of_scores.transpose(1, 2), asking))
        return of_q[:-1].to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


def _padded(x: Tensor) -> Tensor:
    """x (N, D) and a row of zeros."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _slabs(parts: Sequence[Part]) -> Iterator[Part]:
    """The parts, cut into so few groups at a time that no more than `SLAB` pairs are computed."""
    for part in parts:
        groups, queries = part.query.shape
        some = max(1, SLAB // (queries * part.key.shape[1]))
        for start in range(0, groups, some):
            yield part.groups(slice(start, start + some))


def _scores(asking: Tensor, heard: Tensor, part: Part) -> Tensor:
    """(P, G, K) of queries (P, G, D) and keys (P, K, D), -inf where not shown."""
    scores = torch.bmm(asking, heard.transpose(1, 2))
    return scores.masked_fill_(~part.allowed, -torch.inf)


def _add(rows: Tensor, slots: Tensor, some: Tensor) -> None:
    """Add (P, G, D) to the rows (N, D) at slots (P, G), in place."""
    rows.index_add_(0, slots.flatten(), some.flatten(0, 1).to(rows.dtype))


def _merge(out: Tensor, total: Tensor, slots: Tensor, found: Tensor, weight: Tensor, top: Tensor) -> None:
    """Add to the averages of some queries, in place.

    Args:
        out: averages (N, V).
        total: logarithm of all weight so far (N,).
        slots: of the queries (M,).
        found: sum of ``exp(s - top) v`` (M, V).
        weight: sum of ``exp(s - top)``, M numbers.
        top: largest score, or `NOTHING`: M numbers.
    """
    before, top = total[slots], top.flatten().to(total.dtype)
    after = torch.logaddexp(before, (top + weight.flatten().log()).clamp(min=NOTHING))
    total.index_copy_(0, slots, after)
    old = out.index_select(0, slots).mul_((before - after).exp_()[:, None])
    out.index_copy_(0, slots, old.addcmul_(found.to(out.dtype), (top - after).exp_()[:, None]))
