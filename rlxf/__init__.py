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

from rlxf.utils.lazy_names import lazy_attributes, modules_by_name

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

_MODULES = modules_by_name(
    {
        "rlxf.agents.gtrxl": ("GTrXLPPO",),
        "rlxf.agents.decision_transformer": ("DecisionTransformer",),
        "rlxf.agents.mlp": ("BehaviorCloning", "ReturnConditionedMLP"),
        "rlxf.attention": ("TransformerSpec",),
        "rlxf.evaluation": ("evaluate",),
        "rlxf.off_policy_evaluation": ("estimate_return",),
        "rlxf.collection": ("collect",),
        "rlxf.agents.sb3": ("import_sb3",),
    }
)


def exit_on_interrupt(*_: object) -> None:
    """Exit with status 130 and one line: handler of Ctrl-C while the program ``rlxf`` imports its modules."""
    os.write(2, b"rlxf: interrupted\n")
    os._exit(130)


_program = sys.argv[0] if sys.argv else ""
_is_program = os.path.basename(_program) == "rlxf" or (_program == "-m" and "rlxf" in sys.orig_argv)
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_on_interrupt)  # until the start of `rlxf.cli.main`

import_module("rlxf.envs")  # registers the environments; this imports Gymnasium, which takes a second

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = lazy_attributes(globals(), _MODULES)
