"""What goes wrong inside an environment."""


class FaultyEnvironmentError(ValueError):
    """An environment gave what no agent can learn from, such as a reward that is NaN.

    The message names the environment, its step and the value.
    """


class EpisodeLostError(RuntimeError):
    """The episode at hand cannot be gone on with in another process.

    The message says why.
    """
