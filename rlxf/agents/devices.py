"""Devices that an agent can use."""

import torch


def check_device(device: torch.device | str) -> None:
    """Check that a device exists. Stable-Baselines3 silently uses the CPU instead of a missing GPU.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1" ... or a ``torch.device``.

    Raises:
        ValueError: if torch does not support the device, or the GPU does not exist.
    """
    if device == "auto":
        return
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}: {error}") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested.type == "cuda" and (requested.index or 0) >= gpus:
        raise ValueError(
            f"device={str(device)!r} requires a GPU that does not exist: torch finds {gpus or 'none'} on "
            f"this machine; use device='cpu', or 'auto', which uses a GPU if there is one"
        )
