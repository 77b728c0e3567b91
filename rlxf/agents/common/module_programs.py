"""Programs of a model, compiled or captured for each layout of their inputs."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from rlxf.agents.common.captured_function import supports_graphs
from rlxf.agents.common.module_tree import ModuleTree
from rlxf.attention.linear import ALL_HOOKS, Hooks
from rlxf.utils.warnings import warn_user

Program = TypeVar("Program")


class ModulePrograms(ABC, Generic[Program]):
    """Programs of a module, compiled or captured for each layout of their inputs, as long as they are valid.

    Copies and pickles contain no programs, which are compiled or captured again.

    Args:
        device_type: type of the device of the programs, "cpu" or "cuda".

    Attributes:
        is_usable: False once a program could not be made.
    """

    skipped: ClassVar[Collection[str]] = ()
    """Names of children of the module that the programs do not contain."""
    hooks: ClassVar[Hooks] = ALL_HOOKS
    """Hooks that the programs would have to call."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self.is_usable = True
        self._programs: dict[Hashable, Program] = {}
        self._modules: ModuleTree | None = None
        self._warned_of: set[str] = set()

    @property
    def _captures(self) -> bool:
        """True if kernels of the device can be captured."""
        return supports_graphs(torch.device(self.device_type))

    def _current_modules(self, module: nn.Module) -> ModuleTree:
        """Return the submodules of a module; discard the programs if some were replaced."""
        if self._modules is None or not self._modules.is_current:
            self._modules = ModuleTree(module, self.skipped, self.hooks)
            self._programs.clear()
        return self._modules

    def _warn(self, reason: str, effect: str = "") -> None:
        """Warn that there is no program, once for each reason; ``effect`` follows what torch does instead."""
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            warn_user(self._message(reason, effect))

    @abstractmethod
    def _message(self, reason: str, effect: str) -> str:
        """Return the message of the warning that there is no program."""

    def __reduce__(self) -> Any:
        """Copy and pickle this object without its programs."""
        return type(self), (self.device_type,)
