"""SB3's evaluations among the callbacks of a training without environments."""

from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.callbacks import EvalCallback


def evaluations(callback: Any) -> Iterator[EvalCallback]:
    """SB3's ``EvalCallback`` and what is derived from it, in a list of callbacks or inside of one, too."""
    if isinstance(callback, EvalCallback):
        yield callback
    inner = callback if isinstance(callback, list) else getattr(callback, "callbacks", ())
    for each in (*inner, getattr(callback, "callback", None)):
        if each is not None:
            yield from evaluations(each)
