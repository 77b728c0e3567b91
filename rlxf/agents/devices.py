"""Devices that an agent can be asked to use."""

import torch


def check_device(device: torch.device | str) -> None:
    """Check that a device exists here. Stable-Baselines3 takes the CPU in place of a missing GPU, silently.

    Args:
        device: as the agents take it: "auto", "cpu", "cuda", "cuda:1" ... or a ``torch.device``.

    Raises:
        ValueError: if torch knows no such device, or there is no such GPU.
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
