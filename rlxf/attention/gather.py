"""Selection of keys or values by their slots."""

from torch import Tensor


def gather_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Gather x (B, H, T, D) at slots (B, H, n, W) int64, for each head its own: (B, H, n, W, D)."""
    chosen = slots.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, chosen).unflatten(2, slots.shape[2:])
