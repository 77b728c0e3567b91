"""Small pre-training models with noisy weights."""

from typing import Any

import torch

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.agents.pretraining.model import MaskedWindows, Masking
from rlxf.data import Trajectories
from tests.agents.decision_transformer.worlds import K, make_loud, some_trajectories

TINY = decision_transformer(width=16, layers=2, heads=2, dropout=0.0)


def small_pretraining(trajectories: Trajectories | None = None, **changes: Any) -> MaskedPretraining:
    """Return a pre-training with noise on every weight."""
    settings = {"context_length": K, "batch_size": 8, "seed": 3, "device": "cpu", "core": TINY}
    data = some_trajectories() if trajectories is None else trajectories
    return make_loud(MaskedPretraining(data, **(settings | changes)))


def some_windows(pretraining: MaskedPretraining, share: float = 0.4, seed: int = 0) -> MaskedWindows:
    """Return a batch of windows with padding and masked tokens."""
    data = pretraining.trajectories
    assert data is not None
    batch = pretraining.windows(data).starting_at([0, 2, 9, 14, 20, 27])
    assert not batch.mask.all()
    return MaskedWindows(batch, Masking.draw(batch.mask, share, torch.Generator().manual_seed(seed)))
