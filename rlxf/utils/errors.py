"""Exceptions that rlxf raises."""


class DatasetError(ValueError):
    """Error for a dataset that is unknown, empty, truncated, altered, or incompatible with another.

    The message names the dataset or file, the fault, and the remedy.
    """


class RowError(ValueError):
    """Error for an invalid row in a batch of observations or actions.

    Args:
        row: index of the row.
        fault: description of the fault, as the end of the sentence "the observation ...".
    """

    def __init__(self, row: int, fault: str):
        super().__init__(f"row {row}: it {fault}")
        self.row = row
        self.fault = fault


class FaultyEnvironmentError(ValueError):
    """An environment returned a value that no agent can learn from, such as a NaN reward.

    The message names the environment, its step and the value.
    """


class BrokenEnvironmentError(FaultyEnvironmentError):
    """An environment in a worker process failed to start, or failed more often in a row than is allowed.

    A failure is an exception, the death of the process, or a timeout. The message names the environment and
    the last cause. The traceback of the environment is attached as a note of the error (``__notes__``).
    """


class EpisodeLostError(RuntimeError):
    """The current episode cannot be continued in another process.

    The message states the reason.
    """


class CheckpointError(ValueError):
    """Raised if a file is not a valid checkpoint of rlxf.

    The file is truncated, altered, too large, of a newer format, or not written by rlxf. The message names
    the file, the invalid part, and the remedy.
    """


class ResumeError(ValueError):
    """Raised if training cannot be resumed from a valid checkpoint.

    The agent has a different architecture or different settings, or its training is complete. The message
    names the difference and the remedy.
    """


class NumericalError(ArithmeticError):
    """Raised if a loss, a gradient or a recurrent state is NaN or infinite, before the optimizer step.

    The message names the update, the loss term, the parameter or the layer, and the remedy.
    """


class CompilationError(RuntimeError):
    """A function cannot be compiled; the message is the reason."""
