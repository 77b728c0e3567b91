"""Lazy import of the optional dependency faiss (extra ``knn``)."""

from typing import Any

from torch import Tensor

from rlxf.utils.extras import install_command


def import_faiss() -> Any:
    """Import and return the faiss module.

    Raises:
        ImportError: if faiss is not installed.
    """
    try:
        import faiss as module
    except ImportError as error:
        raise ImportError(
            f'index="faiss" requires faiss: run {install_command("knn")}, or use index="torch" ({error})'
        ) from error
    return module


def to_faiss_array(x: Tensor) -> Any:
    """Convert a tensor to a contiguous float32 NumPy array, the input format of faiss."""
    return x.detach().float().cpu().contiguous().numpy()


def check_search_backend(name: str) -> None:
    """Raise ImportError if the search index of this name requires a package that is not installed."""
    if name == "faiss":
        import_faiss()
