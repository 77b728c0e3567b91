"""The closed table of commands. What it names is imported when it is asked for: help comes quickly."""

from collections.abc import Callable
from typing import Protocol

COMMANDS = {
    "train gtrxl": "rlxf.cli.train_gtrxl:TrainGTrXL",
    "train dt": "rlxf.cli.train_dt:TrainDecisionTransformer",
    "resume": "rlxf.cli.resume:Resume",
    "evaluate": "rlxf.cli.evaluate:Evaluate",
    "pretrain": "rlxf.cli.pretrain:Pretrain",
    "distill": "rlxf.cli.distill:Distill",
    "calibrate": "rlxf.cli.calibrate:Calibrate",
    "collect": "rlxf.cli.collect:Collect",
    "datasets": "rlxf.cli.datasets:Datasets",
    "techniques": "rlxf.cli.techniques:Techniques",
}
"""Words of a command -> the dataclass of its options."""

SUMMARIES = {
    "train": "Train an agent.",
    "train gtrxl": "Train a Gated Transformer-XL with PPO on a Gymnasium task.",
    "train dt": "Train a Decision Transformer on Minari datasets.",
    "resume": "Go on with a run that was cut off.",
    "evaluate": "Play whole episodes with the agent of a run and report its returns.",
    "pretrain": "Learn to tell masked tokens of trajectories, for agents to begin with.",
    "distill": "Let a small agent learn from that of a run.",
    "calibrate": "Find how early the agent of a run may leave, and keep it so.",
    "collect": "Record agents or random play into a Minari dataset.",
    "datasets": "List the Minari datasets on this machine.",
    "techniques": "List what a transformer can be made of.",
}
"""What the overviews say of each word."""


class Command(Protocol):
    """The options of a command, read from the command line."""

    def prepare(self) -> Callable[[], None]:
        """Check and build all that was asked for; gives what is left to do.

        Raises:
            ValueError, TypeError, OSError: if that cannot be had; the message is for the user.
        """
        ...
