"""Transformer agents for reinforcement learning in Gymnasium environments.

``import rlxf`` registers the ``rlxf/...`` environments with Gymnasium. It does not import torch: the public
names below are imported on first use.
"""

import os
import signal
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that editors and type checkers know the lazy names
    from rlxf.agents.decision_transformer import DecisionTransformer
    from rlxf.agents.gtrxl import GTrXLPPO
    from rlxf.agents.mlp import BehaviorCloning, ReturnConditionedMLP
    from rlxf.agents.sb3 import import_sb3
    from rlxf.attention import TransformerSpec
    from rlxf.collection import collect
    from rlxf.evaluation import evaluate
    from rlxf.off_policy_evaluation import estimate_return

__version__ = version("rlxf")

_MODULE_OF = {
    "GTrXLPPO": "rlxf.agents.gtrxl",
    "DecisionTransformer": "rlxf.agents.decision_transformer",
    "BehaviorCloning": "rlxf.agents.mlp",
    "ReturnConditionedMLP": "rlxf.agents.mlp",
    "TransformerSpec": "rlxf.attention",
    "evaluate": "rlxf.evaluation",
    "estimate_return": "rlxf.off_policy_evaluation",
    "collect": "rlxf.collection",
    "import_sb3": "rlxf.agents.sb3",
}

__all__ = [
    "GTrXLPPO",
    "DecisionTransformer",
    "BehaviorCloning",
    "ReturnConditionedMLP",
    "TransformerSpec",
    "evaluate",
    "estimate_return",
    "collect",
    "import_sb3",
]


def exit_on_interrupt(*_: object) -> None:
    """Exit with status 130 and one line: handler of Ctrl-C while the program ``rlxf`` imports its modules."""
    os.write(2, b"rlxf: interrupted\n")
    os._exit(130)


_program = sys.argv[0] if sys.argv else ""
_is_program = os.path.basename(_program) == "rlxf" or (_program == "-m" and "rlxf" in sys.orig_argv)
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_on_interrupt)  # until the start of `rlxf.cli.main`

import_module("rlxf.envs")  # registers the environments; this imports Gymnasium, which takes a second


def __getattr__(name: str) -> object:
    """Return the public object ``name``, imported from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'rlxf' has no attribute {name!r}; its public names are {', '.join(_MODULE_OF)}"
        )
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
