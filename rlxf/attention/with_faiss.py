"""Faiss, of the extra knn: read only where it is asked for."""

from typing import Any

from torch import Tensor

from rlxf.utils.extras import install_command


def faiss() -> Any:
    """The module.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import faiss as module
    except ImportError as error:
        raise ImportError(
            f'index="faiss" needs faiss: {install_command("knn")}, or take index="torch" ({error})'
        ) from error
    return module


def as_faiss(x: Tensor) -> Any:
    """Float32 numbers that lie together, as faiss takes them."""
    return x.detach().float().cpu().contiguous().numpy()


def check_index(name: str) -> None:
    """Raise ImportError if the index of that name wants what is not installed."""
    if name == "faiss":
        faiss()
