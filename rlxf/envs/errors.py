"""What goes wrong inside an environment."""


class FaultyEnvironmentError(ValueError):
    """An environment gave what no agent can learn from, such as a reward that is NaN.

    The message names the environment, its step and the value.
    """


class BrokenEnvironmentError(FaultyEnvironmentError):
    """An environment in a process of its own could not begin, or broke more often in a row than it may.

    It raised, its process died, or that did not answer in time. The message names the environment and the
    last cause; the environment's own traceback is a note of the error (``__notes__``).
    """


class EpisodeLostError(RuntimeError):
    """The episode at hand cannot be gone on with in another process.

    The message says why.
    """
