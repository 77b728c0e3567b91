"""Exceptions of training, checkpoints and resuming."""


class CheckpointError(ValueError):
    """Raised if a file is not a valid checkpoint of rlxf.

    The file is truncated, altered, too large, of a newer format, or not written by rlxf. The message names
    the file, the invalid part, and the remedy.
    """


class ResumeError(ValueError):
    """Raised if training cannot be resumed from a valid checkpoint.

    The agent has another architecture or other settings, or its training is complete. The message names the
    difference and the remedy.
    """


class NumericalError(ArithmeticError):
    """Raised if a loss or a gradient is NaN or infinite, before the optimizer step.

    The message names the update, the loss term or the parameter, and the remedy.
    """
