"""Formats of exported acting steps: ONNX, and the programs of torch.export."""

import io
import traceback
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from rlxf.export.acting_step import ActingStep
from rlxf.utils.distributions import unvalidated_distributions
from rlxf.utils.extras import install_command

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
"""File suffix of each format."""
OLDEST_OPSET, DEFAULT_OPSET = 18, 20
"""Oldest ONNX opset that torch's exporter writes, and the one that is used by default."""
EXPORTER = "torch.export"
CHECKED_STARTS = (True, True, *(False,) * 12, True, False)
"""For each step at which an exported step is compared with the original, whether an episode begins."""


class ExportError(ValueError):
    """Error for an agent with a part that cannot be exported; the message names the part and the remedy."""


def check_format(name: str) -> Format:
    """Return the format of this name; raise ValueError if there is none."""
    if name not in SUFFIXES:
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {name!r}")
    return name


def trace_step(step: ActingStep, techniques: dict[str, Any]) -> ExportedProgram:
    """Trace an acting step with torch.export.

    Args:
        step: the acting step, in evaluation mode.
        techniques: techniques of its core by axis, for messages.

    Raises:
        ExportError: if a part of the step cannot be traced, e.g. because it branches on values of tensors.
    """
    try:
        return _traced(step, step.arguments)
    except Exception as error:  # torch.export raises many classes, also internal ones
        fault = _fault_of_user_parts(step) or _technique_fault(error, techniques) or _module_fault(error)
        raise ExportError(fault) from error


def _traced(module: nn.Module, arguments: tuple[Any, ...]) -> ExportedProgram:
    with torch.no_grad(), unvalidated_distributions():
        return torch.export.export(module, arguments, strict=False)


def _fault_of_user_parts(step: ActingStep) -> str | None:
    """Describe the first part of the user's own that cannot be traced alone."""
    for name, (module, arguments) in step.user_parts().items():
        try:
            _traced(module, arguments)
        except Exception as error:
            return (
                f"{EXPORTER} cannot trace the {name} {type(module).__name__} ({_first_line(error)}): "
                f"write its forward with tensor operations alone, e.g. torch.where in place of if"
            )
    return None


def _technique_fault(error: Exception, techniques: dict[str, Any]) -> str | None:
    """Describe the technique in whose module the innermost frame of an error lies."""
    modules = {
        kind.__module__: f"{axis} {part}"
        for axis, technique in techniques.items()
        for part in _with_parts(technique)
        for kind in type(part).__mro__
        if kind.__module__.rpartition(".")[2] not in ("base", "technique", "object")
    }
    for frame in reversed(_frames(error)):
        if (part := modules.get(frame.f_globals.get("__name__", ""))) is not None:
            return (
                f"{part} cannot be exported: its acting step depends on values of tensors in a way that "
                f"{EXPORTER} cannot trace; train an agent with another {part.split()[0]}"
            )
    return None


def _with_parts(technique: Any) -> Iterator[Any]:
    """Yield a technique and those that it combines, such as both patterns of ``first & second``."""
    yield technique
    for field in fields(technique) if is_dataclass(technique) else ():
        yield from _with_parts(getattr(technique, field.name))


def _module_fault(error: Exception) -> str:
    """Describe the innermost module of an error."""
    owners = [frame.f_locals.get("self") for frame in reversed(_frames(error))]
    inside = (type(one).__name__ for one in owners if isinstance(one, nn.Module))
    return f"{EXPORTER} cannot trace {next(inside, 'the acting step')} ({_first_line(error)})"


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _first_line(error: BaseException) -> str:
    """Return the first line of the message of the first error in a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def write_torch(program: ExportedProgram) -> bytes:
    """Return a program of torch.export as the content of a .pt2 file."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def check_opset(opset: int | None) -> int:
    """Return the ONNX opset to write; raise TypeError if it is no whole number, ValueError if too old."""
    if opset is not None and type(opset) is not int:
        raise TypeError(f"opset must be a whole number, got {opset!r}")
    if opset is not None and opset < OLDEST_OPSET:
        raise ValueError(
            f"opset {opset} is too old: torch writes ONNX from opset {OLDEST_OPSET}; use {DEFAULT_OPSET}"
        )
    return DEFAULT_OPSET if opset is None else opset


def write_onnx(
    program: ExportedProgram, step: ActingStep, inputs: list[str], outputs: list[str], opset: int
) -> bytes:
    """Return a traced step as the content of an .onnx file with its weights.

    If onnxruntime is installed, it plays the result for a few steps, and the results are compared.

    Args:
        program: result of `trace_step`.
        step: the acting step.
        inputs: names of the inputs of the graph, in order.
        outputs: names of the outputs.
        opset: ONNX opset, a result of `check_opset`.

    Raises:
        ExportError: if an operation of the step has no form in ONNX, or onnxruntime cannot run the result or
            computes something else.
    """
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    try:
        exported: Any = torch.onnx.export(
            program,
            (),
            input_names=inputs,
            output_names=outputs,
            opset_version=opset,
            dynamo=True,
            verbose=False,
            optimize=False,  # the rewriting rules of onnxscript 0.7.2 change the results of XLRelative
        )
        fold_constants(exported.model)
        remove_unused_nodes(exported.model)
    except Exception as error:
        newer = f"opset {DEFAULT_OPSET}, or " if opset < DEFAULT_OPSET else ""
        raise ExportError(
            f"an operation of the agent cannot be written as ONNX with opset {opset} ({_first_line(error)}); "
            f"use {newer}format='torch'"
        ) from error
    written = next((each.version for each in exported.model_proto.opset_import if not each.domain), None)
    if written != opset:
        raise ExportError(
            f"torch {torch.__version__} cannot write ONNX opset {opset}: use opset={DEFAULT_OPSET}"
        )
    content: bytes = exported.model_proto.SerializeToString()
    _check_runtime(content, step, inputs)
    return content


def _check_runtime(content: bytes, step: ActingStep, inputs: list[str]) -> None:
    """Raise ExportError if onnxruntime cannot run an exported step, or computes other states or actions.

    Discrete actions, also as part of the next state, are not compared, because rounding may decide between
    two of equal probability.
    """
    try:
        import onnxruntime
    except ImportError:
        return
    name = f"onnxruntime {onnxruntime.__version__}"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        differs = any(_differs(session, given, results) for given, results in _played(step, inputs))
    except Exception as error:
        raise ExportError(
            f"{name} cannot run the exported step ({_first_line(error)}); use format='torch', or "
            f"opset={DEFAULT_OPSET} if it was newer"
        ) from error
    if differs:
        raise ExportError(
            f"{name} computes other results than torch for the exported step; use format='torch', and report "
            f"this with the versions of torch, onnxscript and onnxruntime"
        )


def _played(step: ActingStep, inputs: list[str]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Yield inputs and results of the step in `CHECKED_STARTS`; episodes longer than possible are divided."""
    state = step.state
    generator = torch.Generator().manual_seed(0)
    since = 0
    for first in CHECKED_STARTS:
        since = 0 if first or since + 1 == step.most_steps else since + 1
        observations = step.varied_observations(since, generator)
        start = torch.full((step.envs,), since == 0)
        with torch.no_grad():
            action, after = step(observations, start, state)
        given = (*observations.values(), start, *state.values())
        yield {key: x.numpy() for key, x in zip(inputs, given, strict=True)}, [action, *after.values()]
        state = after


def _differs(session: Any, given: dict[str, Any], results: list[Tensor]) -> bool:
    """Return whether the results of onnxruntime for some inputs differ from those of torch."""
    names = [each.name for each in session.get_outputs()]
    is_real = results[0].is_floating_point()
    return not all(
        _is_close(torch.from_numpy(theirs), ours)
        for name, ours, theirs in zip(names, results, session.run(None, given), strict=True)
        if is_real or "action" not in name
    )


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether a result of onnxruntime is that of torch; true if the latter is not finite."""
    actual, expected = actual.double(), expected.double()
    return not expected.isfinite().all() or torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)


def check_installed(format: Format) -> None:
    """Raise ImportError if a package that a format needs is not installed."""
    if format != "onnx":
        return
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"export to ONNX requires onnx and onnxscript: run {install_command('export')}, or use "
            f"format='torch' ({error})"
        ) from error
