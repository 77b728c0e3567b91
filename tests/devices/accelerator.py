"""Accelerator on which these tests run: the simulated one or, with ``RLXF_TEST_DEVICE=cuda``, a GPU."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.devices import virtual_device

NAME = os.environ.get("RLXF_TEST_DEVICE", virtual_device.NAME)
IS_SIMULATED = NAME == virtual_device.NAME
RANDOM = {
    *("bernoulli", "bernoulli_", "multinomial", "native_dropout", "normal", "normal_", "uniform_"),
    *("rand", "rand_like", "randint", "randn", "randn_like"),
}
"""Operations that draw random numbers on the device."""


def install() -> None:
    """Prepare the device in this process. Products and convolutions of a GPU are in full float32."""
    if IS_SIMULATED:
        virtual_device.install()
    else:
        torch.backends.cudnn.allow_tf32 = False


def is_on_device(x: Tensor) -> bool:
    """Return whether a tensor is on the device."""
    return isinstance(x, virtual_device.VirtualTensor) if IS_SIMULATED else x.device.type == NAME


@contextmanager
def waits() -> Iterator[Callable[[], int]]:
    """Count how often the program waits for the device; the target is a function that returns the count."""
    if IS_SIMULATED:
        with virtual_device.traffic() as counts:
            yield counts.waits.total
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lambda: sum("synchronizing CUDA operation" in str(each.message) for each in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_numbers_of_cpu() -> AbstractContextManager[Any]:
    """Return a context in which the device draws the random numbers of the CPU, so that results are equal."""
    return nullcontext() if IS_SIMULATED else RandomNumbersOfCPU()


class RandomNumbersOfCPU(TorchDispatchMode):
    """Context in which operations that draw random numbers run on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device") or next((x.device for x in args if isinstance(x, Tensor)), "cpu")
        if func._schema.name.removeprefix("aten::") not in RANDOM or torch.device(device).type != NAME:
            return func(*args, **kwargs)
        options = tree_map(_to_cpu, kwargs) | ({"device": "cpu"} if "device" in kwargs else {})
        results = func(*tree_map(_to_cpu, args), **options)
        if func._schema.name.endswith("_"):
            return args[0].copy_(results)
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, results)


def _to_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x
