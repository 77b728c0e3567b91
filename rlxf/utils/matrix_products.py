"""Matrix products in float32 by the faster one of the libraries in torch."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rlxf.utils.shared_context import SharedContext

SMALLEST = 2**20
"""Multiply-adds of a product from which oneDNN is faster than MKL; below, its calls take longer."""
PERMISSION = "bf16"
"""Setting of torch by which oneDNN computes products of float32 tensors; see `float32_products`."""
UNSET = "none"
"""Setting of torch if no precision was set; MKL then computes products of float32 tensors."""


def float32_products(size: int, device: torch.device | str = "cpu") -> AbstractContextManager[None]:
    """Return a context that computes large float32 products on the CPU by oneDNN, where MKL is slower.

    torch computes them by MKL, which uses AVX-512 on processors of Intel only. On others that have it, the
    products of oneDNN take half of the time. torch offers these for float32 only together with the permission
    to round the operands to bfloat16, ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``. oneDNN makes
    use of it on processors with AMX, and on other architectures. There, and if products that bfloat16 cannot
    represent are not exact, this context changes nothing. Results differ by rounding in float32.

    The setting is one of the process, and is restored at the end. If a precision was set, it is kept. In the
    context, ``torch.get_float32_matmul_precision`` raises RuntimeError.

    Args:
        size: multiply-adds of a typical product in the context. Below `SMALLEST`, MKL is faster.
        device: device of the products; on others than the CPU, this context changes nothing.
    """
    is_large = size >= SMALLEST and torch.device(device).type == "cpu"
    if not is_large or _get_current_dispatch_mode() is not None or not onednn_is_faster():
        return nullcontext()  # under a dispatch mode, operations are traced
    return products


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN's products in float32 are exact and faster than those of MKL here."""
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return False
    if not hasattr(torch.cpu, "get_capabilities") or not hasattr(backends.mkldnn, "matmul"):
        return False  # an older version of torch
    return _has_slow_mkl(torch.cpu.get_capabilities()) and _is_exact()


def _has_slow_mkl(processor: Mapping[str, Any]) -> bool:
    """Return whether MKL does not use AVX-512 on a processor that has it, and oneDNN does not round."""
    if processor.get("architecture") != "x86_64" or not processor.get("avx512_f"):
        return False
    rounds = any(has for name, has in processor.items() if name.startswith("amx"))
    return not rounds and "intel" not in str(processor.get("cpu_name", "intel")).lower()


def _is_exact() -> bool:
    """Compare products of integers up to 300, exact in float32 but not in bfloat16, with those in float64."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x, y = torch.randint(-300, 301, (2, 4, 96, 96), generator=generator, device="cpu").double()
        with products:
            found = _several_products(x.float(), y.float())
        return all(map(torch.equal, map(Tensor.double, found), _several_products(x, y)))


def _several_products(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return a batch of products, single ones, and one with a bias."""
    return x @ y, x[0] @ y[0], x[0].T @ y[0], F.linear(x, y[0], x[0, 0])


class ProductSetting(SharedContext):
    """Permission of oneDNN's products in this process, for several threads; no effect if a precision was set.

    Attributes:
        in_use: True if products are computed by oneDNN, in a context of `float32_products`.
    """

    def __init__(self) -> None:
        super().__init__(self._permitted)
        self.in_use = False

    @contextmanager
    def _permitted(self) -> Iterator[None]:
        """Permit oneDNN's products, and restore the setting unless another precision was set meanwhile."""
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        if matmul.fp32_precision != UNSET:
            yield
            return
        matmul.fp32_precision = PERMISSION
        self.in_use = True
        try:
            yield
        finally:
            self.in_use = False
            if matmul.fp32_precision == PERMISSION:
                matmul.fp32_precision = UNSET


products = ProductSetting()
"""Setting of this process."""
