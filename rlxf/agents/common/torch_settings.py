"""Settings of torch with which agents cannot be built or trained."""

import torch


def check_defaults() -> None:
    """Check the defaults of torch for new tensors, on which agents rely.

    Raises:
        RuntimeError: if new tensors are not in float32, or on an accelerator; the message has the remedy.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32:
        raise RuntimeError(
            f"the default dtype of torch is {dtype}, and agents are in float32: call "
            f"torch.set_default_dtype(torch.float32) before you build or load an agent"
        )
    if device.type not in ("cpu", "meta"):  # on "meta", agents are built to compare their shapes
        raise RuntimeError(
            f"the default device of torch is {device}, and agents place their tensors themselves: call "
            f"torch.set_default_device('cpu') before you build or load an agent, and pass "
            f"device={device.type!r}"
        )


def check_gradients_enabled() -> None:
    """Check that gradients can be computed, before a training.

    Raises:
        RuntimeError: if they are disabled.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "a training needs gradients, and they are disabled: call learn outside of torch.no_grad() and "
            "torch.inference_mode()"
        )
