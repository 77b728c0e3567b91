"""The generators that everything draws from unless it is given one: kept, and put back."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlxf.training.fit import misfit

GROUP = "generators"
"""Name of the tensors in a file."""
WORDS, WORD_END = 624, 2**32
"""Of a Mersenne twister: its words, and the end of their range."""


def generator_states() -> dict[str, Tensor]:
    """States of the global generators of torch (CPU and each GPU), numpy and Python, by name.

    Python's and numpy's are Mersenne twisters: 624 words, where in them the next draw is, and a normal number
    that was drawn with the last one and waits; NaN if none does.
    """
    twister: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # it is the one that others draw from
    _, words, waiting = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*twister["state"]["key"].tolist(), twister["state"]["pos"]]),
        "numpy_normal": _normal(twister["gauss"] if twister["has_gauss"] else None),
        "python": torch.tensor(words),
        "python_normal": _normal(waiting),
    }
    if torch.cuda.is_available():
        states |= {f"cuda_{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `generator_states` gave. GPUs that are not here are left out.

    Raises:
        CheckpointError: if one is missing or no state.
    """
    try:
        numpys, pythons = _twister(states, "numpy"), _twister(states, "python")
        torch.set_rng_state(states["torch"])
        for number in range(torch.cuda.device_count()):
            if f"cuda_{number}" in states:
                torch.cuda.set_rng_state(states[f"cuda_{number}"], number)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise misfit(f"{GROUP} hold no states of random generators ({error!r})") from error
    words, normal = numpys
    key = np.array(words[:-1], np.uint32)
    np.random.set_state(("MT19937", key, words[-1], int(normal is not None), normal or 0.0))  # noqa: NPY002
    random.setstate((3, tuple(pythons[0]), pythons[1]))


def _twister(states: Mapping[str, Tensor], name: str) -> tuple[list[int], float | None]:
    """Words with the place behind them, and what waits. numpy would take any, and read beyond the words."""
    words, normal = states[name].tolist(), states[f"{name}_normal"].item()
    if len(words) != WORDS + 1 or not all(0 <= word < WORD_END for word in words) or words[-1] > WORDS:
        raise ValueError(f"{name} must be {WORDS} words and a place among them")
    return words, None if np.isnan(normal) else normal


def _normal(number: float | None) -> Tensor:
    return torch.tensor(float("nan") if number is None else number, dtype=torch.float64)
