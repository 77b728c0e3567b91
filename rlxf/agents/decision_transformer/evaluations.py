"""Search for SB3's ``EvalCallback`` in nested callbacks."""

from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.callbacks import EvalCallback


def find_eval_callbacks(callback: Any) -> Iterator[EvalCallback]:
    """Yield each ``EvalCallback`` of SB3 in a callback, a list of callbacks or nested callbacks."""
    if isinstance(callback, EvalCallback):
        yield callback
    inner = callback if isinstance(callback, list) else getattr(callback, "callbacks", ())
    for each in (*inner, getattr(callback, "callback", None)):
        if each is not None:
            yield from find_eval_callbacks(each)
