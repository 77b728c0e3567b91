"""What goes wrong with the files of a run."""


class CheckpointError(ValueError):
    """A file is no whole rlxf checkpoint: truncated, altered, foreign, too large or of a newer format.

    The message is one sentence with the file, the part of it that is wrong, and what to do.
    """
