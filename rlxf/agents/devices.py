"""Devices that an agent can use."""

import torch


def check_device(device: torch.device | str) -> None:
    """Check that a device exists. Stable-Baselines3 silently uses the CPU instead of a missing GPU.

    Args:
        device: as the agents take it: "auto", "cpu", "cuda", "cuda:1" ... or a ``torch.device``.

    Raises:
        ValueError: if torch does not support the device, or there is no such GPU.
    """
    if device == "auto":
        return
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}: {error}") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.type == "cuda" and (asked.index or 0) >= gpus:
        raise ValueError(
            f"device={str(device)!r} asks for a GPU, and torch finds {gpus or 'none'} on this machine: use "
            f"device='cpu', or 'auto', which takes a GPU if there is one"
        )
