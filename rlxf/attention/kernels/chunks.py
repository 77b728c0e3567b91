"""Chunks of sorted tokens, as in published code of Reformer."""

from itertools import product

import torch
from torch import Tensor

from rlxf.attention.index import Index
from rlxf.attention.relation import Relation, find_slots


def times_in_chunks(buckets: Tensor, relation: Relation, chunk: int) -> Tensor:
    """Count how often each key is in the query's chunk or in the previous chunk, over all rounds.

    In each round the tokens of an episode are sorted by bucket and position and cut into chunks; the last
    chunk may be shorter. The chunk before the first chunk of a round is the last chunk of the previous round.
    The chunk before the very first chunk is the very last.

    Args:
        buckets: buckets of the keys, (B, H, Tk, R) int64.
        relation: attention mask; the queries are among the keys.
        chunk: tokens per chunk.

    Returns:
        (B, H, Tq, Tk) int64; undefined for pairs of different episodes.
    """
    own, previous = _chunks(buckets, relation.key, chunk)
    slot = find_slots(relation.key, relation.query).clamp(min=0)[:, None, :, None]
    slot = slot.expand(-1, own.shape[1], -1, own.shape[3])
    return _equal(own.gather(2, slot), own) + _equal(previous.gather(2, slot), own)


def _chunks(buckets: Tensor, index: Index, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the chunk of each token and the previous chunk, (B, H, T, R), numbered across rounds."""
    rounds = buckets.shape[-1]
    episode, span = index.episode, int(index.position.max()) + 1
    bucket = episode[:, None, :, None] * (int(buckets.max()) + 1) + buckets
    rank = (bucket * span + index.position[:, None, :, None]).argsort(2).argsort(2)
    earlier = (episode[:, None] < episode[:, :, None]).sum(-1)
    length = (episode[:, None] == episode[:, :, None]).sum(-1)
    chunks = ((length + chunk - 1) // chunk)[:, None, :, None]
    number = (rank - earlier[:, None, :, None]) // chunk
    number = number + chunks * torch.arange(rounds, device=buckets.device)
    return number, (number - 1) % (rounds * chunks)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Count how many of the numbers a (..., Tq, R) are among those of b (..., Tk, R): (..., Tq, Tk)."""
    pairs = product(a.unbind(-1), b.unbind(-1))
    return torch.stack([x[..., :, None] == y[..., None, :] for x, y in pairs]).sum(0)
