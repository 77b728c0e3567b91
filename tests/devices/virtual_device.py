"""Accelerator that is simulated on the CPU, on which tensors of two devices do not mix, as on a GPU.

A tensor on the device "virtual" wraps a CPU tensor with its numbers. Operations run the kernels of the CPU,
also those that draw random numbers, so results equal those on the CPU up to rounding. The rules are those of
CUDA:

- Tensors of two devices in one operation are an error. A scalar on the CPU is allowed where CUDA allows it.
- A generator of the CPU, and matrix products of integers, are errors.
- The program waits for the device to read a number, in operations whose result has a size that depends on
  numbers, and for copies between the devices unless they are ``non_blocking``. `Traffic` counts both.
- A copy to the CPU that is ``non_blocking`` arrives when the program waits for the next time. Until then, its
  target holds zeros.

torch supports one such device per process, which must exist before the first backward pass. `install` is
therefore called in a process of its own.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "virtual"
SOURCES = f"{Path(__file__).parents[2]}/rlxf/"

COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that copy indices on the CPU to the device."""
SCALAR_ARGUMENT = {"aten::fill", "aten::fill_", "aten::masked_fill", "aten::masked_fill_", *INDEXING}
"""Operations that accept a scalar on the CPU, besides elementwise ones."""
PRODUCTS = {f"aten::{name}" for name in ("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv")}
"""Operations that CUDA has for floating-point numbers only."""
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""Operations whose CUDA kernels return numbers to the CPU, or a tensor whose size depends on numbers."""


class VirtualTensor(Tensor):
    """Tensor on the virtual device.

    Args:
        raw: CPU tensor with the numbers.
    """

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "VirtualTensor":
        return Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, raw: Tensor):
        self.raw = raw

    def __repr__(self, **_: Any) -> str:
        return f"VirtualTensor({self.raw})"

    def __getitem__(self, index: Any) -> Tensor:
        """Select entries; lists of numbers become tensors on the CPU, for which torch fails here."""
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(x) if isinstance(x, list) else x for x in parts))

    def tolist(self) -> Any:
        """Return the numbers as a list, which torch does not support for subclasses."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))


class Traffic:
    """Counts of copies and waits, by the line of rlxf that caused them.

    Args:
        waits: times that the program waited for the device, copies included.
        copies: copies in either direction for which the program did not wait.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()


_listeners: list[Traffic] = []
_arriving: list[tuple[Tensor, Tensor]] = []
"""Targets on the CPU of copies that have not arrived, with their numbers."""


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count copies and waits in the body."""
    counts = Traffic()
    _listeners.append(counts)
    try:
        yield counts
    finally:
        _listeners.remove(counts)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of torch with arguments on the virtual device, or with this device as an option."""
    if not torch.is_inference_mode_enabled():
        return _run(func, args, kwargs)
    # Views of other tensors cannot be wrapped in inference mode, which does not decompose operations either.
    with torch.inference_mode(False), torch.no_grad():
        decomposed = func.decompose(*args, **kwargs)
        return _run(func, args, kwargs) if decomposed is NotImplemented else decomposed


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    flat, layout = tree_flatten((args, kwargs))
    own = [x for x in flat if isinstance(x, VirtualTensor)]
    target = kwargs.get("device")
    to_device = bool(own) if target is None else torch.device(target).type == NAME
    if name not in COPIES and own:
        _check_one_device(func, args, flat)
    if to_device:
        _check_supported(name, own, flat)
    transfer = kind_of_transfer(name, args, kwargs, bool(own), to_device)
    _record(transfer)
    options = kwargs if target is None else kwargs | {"device": torch.device("cpu")}
    if target is not None:
        flat, layout = tree_flatten((args, options))
    raw_args, raw_options = tree_unflatten([_unwrap(x) for x in flat], layout)
    result = func(*raw_args, **raw_options)
    if not to_device or (name == "aten::copy_" and not isinstance(args[0], VirtualTensor)):
        return _delayed(result) if transfer == "copies" else result
    if any(x.shape != x.raw.shape for x in own):
        raise NotImplementedError(f"{name} resizes a tensor on {NAME}")
    known = {id(x.raw): x for x in own}
    return _wrap(result, known) if isinstance(result, Tensor) else tree_map(lambda x: _wrap(x, known), result)


def _unwrap(x: Any) -> Any:
    return x.raw if isinstance(x, VirtualTensor) else x


def _wrap(x: Any, known: dict[int, VirtualTensor]) -> Any:
    """Return a result on the device; that of an in-place operation is among the ``known`` arguments."""
    if not isinstance(x, Tensor) or id(x) in known:
        return known.get(id(x), x)
    # Kernels that are called here do not see that a tensor is to be conjugated or negated.
    return VirtualTensor(x.resolve_conj().resolve_neg() if x.is_complex() or x.is_neg() else x)


def _check_one_device(func: Any, args: Any, flat: list[Any]) -> None:
    """Raise RuntimeError if an operation mixes tensors of two devices in a way that CUDA rejects."""
    name, allowed = func._schema.name, []
    others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, VirtualTensor)]
    if not others:
        return
    if name in INDEXING and isinstance(args[0], VirtualTensor):
        allowed = [id(x) for x in tree_leaves(args[1])]
    scalars = torch.Tag.pointwise in func.tags or name in SCALAR_ARGUMENT
    if any((x.dim() or not scalars) and id(x) not in allowed for x in others):
        raise RuntimeError(f"{name}: tensors are on two devices, {NAME} and cpu, at {caller()}")


def _check_supported(name: str, own: list["VirtualTensor"], flat: list[Any]) -> None:
    """Raise RuntimeError for a generator of the CPU, and for a matrix product of integers."""
    if any(isinstance(x, torch.Generator) for x in flat):
        raise RuntimeError(f"{name}: the generator is on the cpu, at {caller()}")
    if name in PRODUCTS and not all(x.is_floating_point() or x.is_complex() for x in own):
        raise RuntimeError(f"{name} is not implemented for integers, at {caller()}")


def kind_of_transfer(name: str, args: Any, kwargs: Any, from_device: bool, to_device: bool) -> str | None:
    """Return "waits" or "copies", the field of `Traffic` that counts an operation; None for neither."""
    if name in INDEXING and from_device:
        return "waits" if _waits_for_indices(name, args) else None
    if name not in COPIES:
        return "waits" if name in WAITING and from_device else None
    source, target = from_device, to_device
    if name == "aten::copy_":
        target, source = (isinstance(x, VirtualTensor) for x in args[:2])
    if source == target:
        return None
    return (
        "copies" if kwargs.get("non_blocking") or (name == "aten::copy_" and True in args[2:3]) else "waits"
    )


def _waits_for_indices(name: str, args: Any) -> bool:
    """Return whether an index is a mask, whose size CUDA reads unless it only fills, or is on the CPU."""
    indices = [x for x in args[1] if x is not None]
    masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
    fills = name != "aten::index" and args[2].numel() == 1
    return (masks and not fills) or not all(isinstance(x, VirtualTensor) for x in indices)


def _record(transfer: str | None) -> None:
    """Count a transfer. If the program waits, all copies arrive."""
    if transfer == "waits":
        for target, numbers in _arriving:
            target.copy_(numbers)
        _arriving.clear()
    for counts in _listeners if transfer else ():
        getattr(counts, transfer)[caller()] += 1


def _delayed(result: Tensor) -> Tensor:
    """Replace the numbers of a copy until it arrives."""
    _arriving.append((result, result.clone()))
    return result.zero_()


def caller() -> str:
    """Return the innermost line of rlxf that is being executed, with its function."""
    frame = sys._getframe()
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    file = frame.f_code.co_filename.removeprefix(SOURCES)
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"


class BackendModule(_DummyBackendModule):
    """Module ``torch.virtual``; random numbers are those of the CPU."""

    @contextmanager
    def device(self, _: Any) -> Iterator[None]:
        """Select a device, of which there is one."""
        yield

    def get_rng_state(self, *_: Any) -> Tensor:
        """Return the state of the generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        """Set the state of the generator."""
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.bfloat16, torch.float16]


def _via_cpu(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that creates a tensor from values on the CPU and copies it, as torch does for CUDA.

    For devices in Python, torch's own functions end in an internal assertion.
    """

    @wraps(create)
    def created(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, VirtualTensor):
            device = data.device if device is None else device
            return data.to(*args, device=device, **options)
        if device is None or torch.device(device).type != NAME:
            return create(data, *args, device=device, **options)
        return create(data, *args, **options).to(device)

    return created


def _new_tensor(self: Tensor, data: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return torch.tensor(data, dtype=dtype or self.dtype, device=self.device, **options)


def _arange(*limits: float, **options: Any) -> Tensor:
    """Create a range as a whole; torch's composition resizes an empty tensor, which a wrapper cannot do."""
    return VirtualTensor(torch.arange(*limits, **options | {"device": "cpu"}))


def _eye(*shape: int, **options: Any) -> Tensor:
    """Create an identity matrix as a whole, as `_arange` does."""
    return VirtualTensor(torch.eye(*shape, **options | {"device": "cpu"}))


class _OnCPU(torch.autograd.Function):
    """Differentiable function that torch computes on CPU and CUDA only."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *given: VirtualTensor) -> Any:
        ctx.given = [x.raw.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            ctx.results = function(*ctx.given)
        return tuple(VirtualTensor(x.detach()) for x in ctx.results)

    @staticmethod
    def backward(ctx: Any, *gradients: VirtualTensor) -> Any:
        own = torch.autograd.grad(ctx.results, ctx.given, [each.raw for each in gradients])
        return None, *map(VirtualTensor, own)


def _recurrence(compute: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return torch's LSTM or GRU, also for tensors on the device; batch sizes stay on the CPU."""

    @wraps(compute)
    def computed(*args: Any) -> tuple[Tensor, ...]:
        flat, layout = tree_flatten(args)
        if not isinstance(flat[0], VirtualTensor):
            return compute(*args)
        places = [n for n, x in enumerate(flat) if isinstance(x, Tensor) and x.is_floating_point()]

        def on_cpu(*given: Tensor) -> tuple[Tensor, ...]:
            replaced = dict(zip(places, given, strict=True))
            return compute(*tree_unflatten([replaced.get(n, x) for n, x in enumerate(flat)], layout))

        return _OnCPU.apply(on_cpu, *(flat[n] for n in places))

    return computed


def install() -> None:
    """Add the device to this process, for its lifetime."""
    _setup_privateuseone_for_python_backend(NAME, BackendModule())
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, "PrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for overload in ("arange", "arange.start", "arange.start_step"):
        factories.impl(overload, _arange, "PrivateUse1")
    for overload in ("eye", "eye.m"):
        factories.impl(overload, _eye, "PrivateUse1")
    _kept.extend([library, factories])
    torch.__future__.set_swap_module_params_on_conversion(True)  # optimizers then keep their parameters
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _via_cpu(getattr(torch, name)))
    for name in ("lstm", "gru"):
        setattr(torch._VF, name, _recurrence(getattr(torch._VF, name)))
    Tensor.new_tensor = _new_tensor  # type: ignore[method-assign]


_kept: list[Any] = []
"""Registrations, which end when their objects do."""
