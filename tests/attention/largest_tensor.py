"""Dispatch mode that measures the largest tensor of a computation."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_leaves(result)
            if isinstance(x, Tensor)
        ]
        self.size = max([self.size, *sizes])
        return result
