"""Errors raised for failures inside an environment."""


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
