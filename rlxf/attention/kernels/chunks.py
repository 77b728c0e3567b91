"""What published code of Reformer sees: chunks of a sorted sequence."""

from itertools import product

import torch
from torch import Tensor

from rlxf.attention.index import Index
from rlxf.attention.relation import Relation, find_slots


def times_in_chunks(buckets: Tensor, relation: Relation, chunk: int) -> Tensor:
    """How often a query finds each key in its chunk and in the one before, over all rounds.

    In each round the tokens of an episode are sorted by bucket and position and cut into chunks; the last
    one is shorter where it has to be. Before the first chunk of a round comes the last one of the round
    before, and before the very first the very last.

    Args:
        buckets: of the keys, (B, H, Tk, R) int64.
        relation: whose queries are among the keys.
        chunk: tokens of a chunk.

    Returns:
        (B, H, Tq, Tk) int64; anything for pairs of different episodes.
    """
    own, before = _chunks(buckets, relation.key, chunk)
    slot = find_slots(relation.key, relation.query).clamp(min=0)[:, None, :, None]
    slot = slot.expand(-1, own.shape[1], -1, own.shape[3])
    return _equal(own.gather(2, slot), own) + _equal(before.gather(2, slot), own)


def _chunks(buckets: Tensor, index: Index, chunk: int) -> tuple[Tensor, Tensor]:
    """The chunk of each token and the one before, (B, H, T, R); numbers count on from round to round."""
    rounds = buckets.shape[-1]
    episode, span = index.episode, int(index.position.max()) + 1
    place = episode[:, None, :, None] * (int(buckets.max()) + 1) + buckets
    rank = (place * span + index.position[:, None, :, None]).argsort(2).argsort(2)
    earlier = (episode[:, None] < episode[:, :, None]).sum(-1)
    length = (episode[:, None] == episode[:, :, None]).sum(-1)
    chunks = ((length + chunk - 1) // chunk)[:, None, :, None]
    number = (rank - earlier[:, None, :, None]) // chunk
    number = number + chunks * torch.arange(rounds, device=buckets.device)
    return number, (number - 1) % (rounds * chunks)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """How many of the numbers a (..., Tq, R) are among those of b (..., Tk, R): (..., Tq, Tk)."""
    pairs = product(a.unbind(-1), b.unbind(-1))
    return torch.stack([one[..., :, None] == other[..., None, :] for one, other in pairs]).sum(0)
