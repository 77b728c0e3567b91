"""States of the global random number generators of torch, numpy and Python."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlxf.training.fit import misfit

GROUP = "generators"
"""Name of the group of tensors in a file."""
WORDS, WORD_END = 624, 2**32
"""Number of words of a Mersenne twister, and exclusive upper bound of a word."""


def generator_states() -> dict[str, Tensor]:
    """Return the states of the global generators of torch (CPU and each GPU), numpy and Python, by name.

    The generators of Python and numpy are Mersenne twisters: 624 words, the position of the next word, and a
    cached normal deviate (NaN if there is none).
    """
    twister: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # environments may use the global generator
    _, words, cached = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*twister["state"]["key"].tolist(), twister["state"]["pos"]]),
        "numpy_normal": _normal(twister["gauss"] if twister["has_gauss"] else None),
        "python": torch.tensor(words),
        "python_normal": _normal(cached),
    }
    if torch.cuda.is_available():
        states |= {f"cuda_{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore the result of `generator_states`; states of GPUs that this machine lacks are ignored.

    Raises:
        CheckpointError: if a state is missing or invalid.
    """
    try:
        numpy_state, python_state = _twister(states, "numpy"), _twister(states, "python")
        torch.set_rng_state(states["torch"])
        for number in range(torch.cuda.device_count()):
            if f"cuda_{number}" in states:
                torch.cuda.set_rng_state(states[f"cuda_{number}"], number)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise misfit(f"{GROUP} contain no valid states of random number generators ({error!r})") from error
    words, normal = numpy_state
    key = np.array(words[:-1], np.uint32)
    np.random.set_state(("MT19937", key, words[-1], int(normal is not None), normal or 0.0))  # noqa: NPY002
    random.setstate((3, tuple(python_state[0]), python_state[1]))


def _twister(states: Mapping[str, Tensor], name: str) -> tuple[list[int], float | None]:
    """Return the words followed by the position, and the cached normal deviate.

    The position is validated here, as numpy accepts any position and then reads out of bounds.
    """
    words, normal = states[name].tolist(), states[f"{name}_normal"].item()
    if len(words) != WORDS + 1 or not all(0 <= word < WORD_END for word in words) or words[-1] > WORDS:
        raise ValueError(f"{name} must be {WORDS} words and a position from 0 to {WORDS}")
    return words, None if np.isnan(normal) else normal


def _normal(number: float | None) -> Tensor:
    return torch.tensor(float("nan") if number is None else number, dtype=torch.float64)
