"""List of what a forward keeps for an auxiliary loss."""

from typing import Any, TypeVar

Item = TypeVar("Item")


class PendingTerms(list[Item]):
    """List of what the last forward keeps for an auxiliary loss; a copy or pickle of it is empty.

    Its tensors belong to the autograd graph of that forward, which cannot be copied.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), ()
