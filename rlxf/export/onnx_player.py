"""Player of an exported agent, which needs onnxruntime and numpy only: copy this file anywhere.

player, state = Player("policy.onnx"), None
action, state = player.predict(observation, state, episode_start)
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

State = dict[str, np.ndarray]


def read_verified(folder: Path, sums: dict[str, str], name: str) -> bytes:
    """Return the content of a file; raise ValueError unless its SHA-256 is the one in ``sums``."""
    content = (folder / name).read_bytes()
    if name not in sums:
        raise ValueError(f"{folder / name} is not in the .sha256 file: keep the file names, or export again")
    if (digest := hashlib.sha256(content).hexdigest()) != sums[name]:
        raise ValueError(f"{folder / name} was altered: its SHA-256 is {digest}; export the agent again")
    return content


def cast_in_range(name: str, given: np.ndarray, part: dict[str, Any]) -> np.ndarray:
    """Cast an observation to the dtype of its part.

    Args:
        name: name of the part, for the message.
        given: (...) or (E, ...).
        part: description of the part; "low" and "high", the range of a discrete part, may be missing.

    Raises:
        ValueError: if an element is no finite number, or the range or the dtype does not contain it. Only a
            cast to floats may round.
    """
    if given.dtype.kind not in "biuf":
        raise ValueError(f"{name} must contain numbers, got an array of {given.dtype}")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise ValueError(f"{name} contains NaN or an infinite number")
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(part["dtype"], copy=False)
    valid = np.isfinite(array) if array.dtype.kind == "f" else array == given
    if "low" in part:
        low, high = (np.broadcast_to(part[key], given.shape) for key in ("low", "high"))
        valid &= (low <= given) & (given <= high)
    if not valid.all():
        first = tuple(np.argwhere(~valid)[0])
        allowed = f"integers from {low[first]} to {high[first]}" if "low" in part else f"{array.dtype} values"
        raise ValueError(f"{name} contains {given[first]}, but only {allowed} are allowed")
    return array


class Player:
    """Agent that acts from an exported file, with the interface of ``predict`` of Stable-Baselines3.

    A file that was altered after the export raises ValueError.

    Args:
        path: the .onnx file, next to the .json file with its description and the .sha256 file with checksums.
        providers: execution providers of onnxruntime.
    """

    def __init__(self, path: str | Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)):
        import onnxruntime

        path = Path(path)
        lines = path.with_suffix(".sha256").read_text(encoding="utf-8", errors="replace").splitlines()
        # Before a name, sha256sum writes a second space or, in binary mode, an asterisk.
        sums = {name[1:]: digest for digest, _, name in (line.partition(" ") for line in lines)}
        model = read_verified(path.parent, sums, path.name)
        self.description = json.loads(read_verified(path.parent, sums, path.with_suffix(".json").name))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only, not what onnxruntime could not optimize
        self.session = onnxruntime.InferenceSession(model, options, providers=list(providers))
        self.observations: dict[str, Any] = self.description["observations"]
        self.envs: int = self.description["n_envs"]

    def initial_state(self) -> State:
        """Return the state before the first step."""
        state = {}
        for name, one in self.description["state"].items():
            values = np.array(one["values"], one["dtype"])
            state[name] = np.full(one["shape"], values) if values.ndim == 0 else values.reshape(one["shape"])
        return state

    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[np.ndarray, State]:
        """Choose the most likely actions.

        Args:
            observation: raw observation, with an axis for the environments unless there is one only.
            state: state that the previous call returned; None to start. It is not modified.
            episode_start: which observations are the first of an episode; None for none but the first.
            deterministic: must be True: the exported step does not sample.

        Raises:
            ValueError: if an argument does not fit, an observation is not finite, would change by a cast to
                integers, or is out of the range of a discrete space, or the action or the state is NaN.
        """
        if not deterministic:
            raise ValueError("an exported agent takes the most likely action: use deterministic=True")
        start = np.asarray(state is None or (False if episode_start is None else episode_start), bool)
        if start.shape not in ((), (self.envs,)):
            raise ValueError(f"episode_start must have shape ({self.envs},), got {start.shape}")
        inputs = {"episode_start": np.array(np.broadcast_to(start, (self.envs,)))}
        for name, one in self.observations.items():
            key = name.partition(".")[2]
            if key and not (isinstance(observation, dict) and key in observation):
                raise ValueError(f"the observation must be a dict with the entry {key!r}")
            inputs[name], batched = self._array(name, observation[key] if key else observation, one)
        given = self.initial_state() if state is None else state
        state = {name: np.asarray(x) for name, x in given.items()} if isinstance(given, dict) else {}
        expected = {name: (x["shape"], x["dtype"]) for name, x in self.description["state"].items()}
        if {name: (list(x.shape), x.dtype) for name, x in state.items()} != expected:
            raise ValueError("state is not that of this agent: pass the one that predict returned")
        action, *new = self.session.run(None, inputs | {f"state.{name}": x for name, x in state.items()})
        if any(np.isnan(x).any() for x in (action, *new) if x.dtype.kind == "f"):
            raise ValueError("the action or the next state is NaN: an observation or the state is invalid")
        return (action if batched else action[0]), dict(zip(self.description["state"], new, strict=True))

    def _array(self, name: str, given: Any, part: dict[str, Any]) -> tuple[np.ndarray, bool]:
        """Return an observation with an axis for the environments, and whether it already had one."""
        shape = part["shape"]
        try:
            value = np.asarray(given)
        except ValueError:  # parts of different shapes
            value = np.asarray(None)
        single = self.envs == 1 and list(value.shape) == shape[1:]
        if value.dtype == object or (not single and list(value.shape) != shape):
            got = f"a {type(given).__name__}: flatten it" if value.dtype == object else list(value.shape)
            raise ValueError(f"{name} must have shape {shape}, got {got}")
        return cast_in_range(name, value[None] if single else value, part), not single
