"""What goes wrong with a run: its files, and its numbers."""


class CheckpointError(ValueError):
    """A file is no whole rlxf checkpoint: truncated, altered, foreign, too large or of a newer format.

    The message is one sentence with the file, the part of it that is wrong, and what to do.
    """


class ResumeError(ValueError):
    """A training cannot go on from this file, though it is whole: the agent is built otherwise, or was done.

    The message says what differs, and what to do.
    """


class NumericalError(ArithmeticError):
    """A loss or a gradient became NaN or infinite. The step of the optimiser was not taken.

    The message names the update, the part of the loss or the parameter, and what to do.
    """
