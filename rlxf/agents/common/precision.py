"""Precision of updates: float32, or bfloat16 for matrix products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from rlxf.attention.linear import matmul_dtype
from rlxf.training.json_rules import choice
from rlxf.utils.warnings import warn_user

Precision = Literal["float32", "bf16-mixed"]
"""Precision of updates, with the name of PyTorch Lightning for bfloat16 with weights in float32."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PRECISION_RULE = choice(*PRECISIONS)
"""Rule of a precision."""


def check_precision(precision: str, device: torch.device | str) -> None:
    """Check the precision of an agent.

    Raises:
        TypeError: if it is not a string.
        ValueError: if it is unknown.

    Warns:
        UserWarning: if the device emulates bfloat16, which is slower than float32.
    """
    PRECISION_RULE.check_argument("precision", precision)
    if precision != "float32" and _emulates_bfloat16(torch.device(device)):
        warn_user(
            f"precision={precision!r} is slower than float32 here: {device} has no instructions for bfloat16 "
            f"and emulates its products; use precision='float32'"
        )


def mixed_precision(precision: Precision, training: bool) -> AbstractContextManager[None]:
    """Return the context in which a model computes the outputs that its losses use.

    Args:
        precision: precision of updates.
        training: True in an update; otherwise, e.g. while acting, the precision is float32.
    """
    if precision == "float32" or not training:
        return nullcontext()
    return matmul_dtype(torch.bfloat16)


def _emulates_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch do not report them
    return capabilities is not None and not any(x for name, x in capabilities().items() if "bf16" in name)
