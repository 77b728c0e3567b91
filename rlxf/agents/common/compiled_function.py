"""Functions of tensors, compiled ahead of time into machine code."""

import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn

from rlxf.utils.errors import CompilationError
from rlxf.utils.warnings import silenced

TIME_LIMIT = 300.0
"""Seconds after which a compilation is given up."""
EQUAL_RESULTS = ", with results that are equal up to rounding"
"""Part of the warning that a function is not compiled: what torch runs in its place."""
PROGRAM = """
import sys, torch
source, target, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
program = torch.export.load(source)
options = {"fallback_random": True, "always_keep_tensor_constants": True}
torch._inductor.aoti_compile_and_package(program, package_path=target, inductor_configs=options)
"""
"""Program of the process that compiles, which can be ended after the time limit.

With ``fallback_random``, random numbers come from torch's generator, like those of the function itself.
``always_keep_tensor_constants`` means that each call reads parameters of a few elements, too, which are
constants of the program otherwise.
"""


class CompiledFunction:
    """Function of tensors of fixed shapes, compiled by torch's AOTInductor for the CPU.

    The function reads the parameters and buffers of the module when it is called, so updates in place need no
    notification. Parameters that were replaced are detected by their address. The module's arguments that it
    changes in place are changed in place by the compiled function, too.

    Args:
        module: the function. Its decisions may depend on shapes, but not on values.
        examples: arguments, which must be tensors on the CPU.

    Raises:
        CompilationError: if the function cannot be traced, no C++ compiler is available, or the compilation
            fails or takes longer than `TIME_LIMIT`.
    """

    def __init__(self, module: nn.Module, examples: Sequence[Tensor]):
        program = trace(module, examples)
        with TemporaryDirectory(prefix="rlxf-") as folder:
            self._model = _compile(program, Path(folder))
        self._read = ModuleTensors(module, self._model.get_constant_fqns())
        _check_complete(program, self._read)
        self._load_constants()

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the results of the function for tensors with the shapes of the examples."""
        if self._addresses != self._read.addresses():
            self._load_constants()
        results: list[Tensor] = self._model.loader.boxed_run(list(arguments))
        return results

    def _load_constants(self) -> None:
        """Let the function read the present parameters and buffers of the module."""
        self._addresses = self._read.addresses()
        constants = {name: x.detach() for name, x in zip(self._read.names, self._read.present(), strict=True)}
        self._model.load_constants(constants, check_full_update=False, user_managed=True)
        self._constants = constants  # the function reads their memory


class ModuleTensors:
    """Parameters and buffers of a module, also after some were replaced.

    Replacements are detected by their memory addresses.

    Args:
        module: the module; its submodules must stay the same, see `ModuleTree`.
        among: names of which those of parameters and buffers count; None for all of them.
    """

    def __init__(self, module: nn.Module, among: Collection[str] | None = None):
        named = chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        self.names = sorted({name for name, _ in named if among is None or name in among})
        owners = [_owner(module, name) for name in self.names]
        self._tables, self._keys = [table for table, _ in owners], [key for _, key in owners]

    def present(self) -> Iterator[Tensor]:
        """Return the present tensors, in the order of `names`."""
        return map(getitem, self._tables, self._keys)

    def addresses(self) -> list[int]:
        """Return the present addresses."""
        return list(map(Tensor.data_ptr, self.present()))


def trace(module: nn.Module, examples: Sequence[Any]) -> torch.export.ExportedProgram:
    """Trace a function without gradient.

    Raises:
        CompilationError: if torch.export cannot trace it.
    """
    try:
        with torch.no_grad(), silenced():
            return torch.export.export(module, tuple(examples), strict=False)
    except Exception as error:  # torch.export raises errors of many kinds
        name, reason = type(error).__name__, str(error).strip().partition("\n")[0]
        raise CompilationError(f"torch.export cannot trace it: {name}: {reason}") from error


def _compile(program: torch.export.ExportedProgram, folder: Path) -> Any:
    """Compile a program in a process of its own, and load the result.

    The process does not import modules from the working directory (``-P``).
    """
    source, target = folder / "program.pt2", folder / "compiled.pt2"
    command = [sys.executable, "-P", "-c", PROGRAM, str(source), str(target), str(torch.get_num_threads())]
    try:
        torch.export.save(program, source)
        subprocess.run(command, check=True, timeout=TIME_LIMIT, capture_output=True, text=True)
        return torch._inductor.aoti_load_package(str(target))
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"the compilation took longer than {TIME_LIMIT:g} seconds") from error
    except subprocess.CalledProcessError as error:
        raise CompilationError(f"the compilation failed: {_last_line(error.stderr)}") from error
    except (OSError, RuntimeError) as error:  # e.g. a full disk, or a folder whose files must not be executed
        raise CompilationError(f"the compiled file cannot be written or loaded: {error}") from error


def _check_complete(program: torch.export.ExportedProgram, read: ModuleTensors) -> None:
    """Raise CompilationError if the compiled program does not read a tensor that its results depend on."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    used = {names[node.name] for node in _inputs_of_results(program) if node.name in names}
    tensors, known = {**program.state_dict, **program.constants}, set(read.addresses())
    fixed = sorted(name for name in used if tensors[name].data_ptr() not in known)
    if fixed:
        raise CompilationError(f"the compiler made constants of {', '.join(fixed)}")


def _inputs_of_results(program: torch.export.ExportedProgram) -> set[fx.Node]:
    """Return the nodes on which the results of a program depend."""
    found: set[fx.Node] = set()
    waiting = list(program.graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table of the module that holds a parameter or buffer, and its name there."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def _last_line(text: str) -> str:
    """Return the last line of a message that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
