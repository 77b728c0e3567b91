"""Submodules of a model, to detect what a compiled or captured program of it does not contain."""

from itertools import chain, repeat
from operator import contains
from typing import Any

from torch import Tensor, nn

from rlxf.attention.linear import GLOBAL_HOOKS, hooks_of, is_patched


class ModuleTree:
    """Submodules of a module, and their hooks.

    A program of the module's operations is that of its present submodules. It neither follows replaced ones
    nor calls hooks. A check takes a few microseconds.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._modules = dict(module.named_modules())
        modules = self._modules.values()
        self._parameters = [each._parameters for each in modules if each._parameters]
        self._tables: list[dict[str, Any]] = [each._modules for each in modules if each._modules]
        self._children = self._present()
        self._hooks = [*GLOBAL_HOOKS, *chain.from_iterable(map(hooks_of, modules))]
        self._attributes = list(map(vars, modules))

    @property
    def is_current(self) -> bool:
        """True if no submodule was added, removed or replaced, among those of modules that had some."""
        return self._children == self._present()

    def _present(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def find_patch(self) -> str | None:
        """Describe the first module whose calls are changed, see `is_patched`; None if there is none."""
        if not any(self._hooks) and not any(map(contains, self._attributes, repeat("forward"))):
            return None
        if any(GLOBAL_HOOKS):
            return "torch has hooks for all modules"
        patched = (name for name, module in self._modules.items() if is_patched(module))
        return f"the module {next(patched) or 'itself'} has a hook or an assigned forward"

    def find_gradient_hook(self) -> str | None:
        """Describe the first parameter with a hook for its gradient; None if there is none."""
        values = chain.from_iterable(map(dict.values, self._parameters))
        if not any(map(_has_hook, values)):
            return None
        name = next(name for name, x in self._module.named_parameters() if _has_hook(x))
        return f"the parameter {name} has a hook"


def _has_hook(parameter: Tensor | None) -> bool:
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
