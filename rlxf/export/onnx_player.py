"""Player of an exported agent, which needs onnxruntime and numpy only: copy this file anywhere.

player, state = Player("policy.onnx"), None
action, state = player.predict(observation, state, episode_start)
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np


def read_verified(file: Path) -> bytes:
    """Return the content of a file; raise ValueError unless its SHA-256 is that in the .sha256 file."""
    lines = file.with_suffix(".sha256").read_text(encoding="utf-8", errors="replace").splitlines()
    # Before a name, sha256sum writes a second space or, in binary mode, an asterisk.
    sums = {name[1:]: digest for digest, _, name in (line.partition(" ") for line in lines)}
    if file.name not in sums:
        raise ValueError(f"{file} is not in the .sha256 file: keep the file names, or export again")
    content = file.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != sums[file.name]:
        raise ValueError(f"{file} was altered: its SHA-256 is {digest}; export the agent again")
    return content


def as_input(name: str, given: Any, part: dict[str, Any]) -> tuple[np.ndarray, bool]:
    """Return an observation as an array (E, ...) of its dtype, and whether it had the axis of environments.

    Raises ValueError for numbers that are not from "low" to "high" of the part, or no integers if these are.
    """
    try:
        value = np.asarray(given)
    except ValueError:  # parts of different shapes
        value = np.asarray(None)
    shape, layout = part["shape"], list(value.shape)
    if value.dtype == object:
        raise ValueError(f"{name} must have shape {shape}, got a {type(given).__name__}: flatten it")
    if value.dtype.kind not in "biuf" or shape not in (layout, [1, *layout]):
        raise ValueError(f"{name} must have shape {shape} of numbers, got {layout} of {value.dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        cast = value.astype(part["dtype"], copy=False)
    low, high = (np.broadcast_to(np.asarray(part[key], cast.dtype), layout) for key in ("low", "high"))
    valid = (low <= cast) & (cast <= high) & (cast is value or cast.dtype.kind == "f" or cast == value)
    if not valid.all():
        at = tuple(np.argwhere(~valid)[0])
        raise ValueError(f"{name} contains {value[at]}, must be {cast.dtype} from {low[at]} to {high[at]}")
    return cast.reshape(shape), layout == shape


class Player:
    """Agent of an .onnx file, with ``predict`` as in Stable-Baselines3; altered files raise ValueError."""

    def __init__(self, path: str | Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)):
        import onnxruntime

        model, description = (read_verified(file) for file in (Path(path), Path(path).with_suffix(".json")))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only, not what onnxruntime could not optimize
        self.session = onnxruntime.InferenceSession(model, options, providers=list(providers))
        self.description: dict[str, Any] = json.loads(description)
        self.envs: int = self.description["n_envs"]

    def initial_state(self) -> dict[str, np.ndarray]:
        """Return the state before the first step."""
        parts = self.description["state"].items()
        return {name: np.resize(np.array(x["values"], x["dtype"]), x["shape"]) for name, x in parts}

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Choose the most likely actions; an invalid argument, and a result that is NaN, raise ValueError.

        Args:
            observation: raw observation, with an axis for the environments unless there is one only.
            state: state that the previous call returned; None to start. It is not modified.
            episode_start: which observations are the first of an episode; None for none but the first.
            deterministic: must be True: the exported step does not sample.
        """
        if not deterministic:
            raise ValueError("an exported agent takes the most likely action: use deterministic=True")
        start = np.asarray(state is None or episode_start, bool)
        if start.shape not in ((), (self.envs,)):
            raise ValueError(f"episode_start must have shape ({self.envs},), got {start.shape}")
        inputs = {"episode_start": np.full(self.envs, start)}
        for name, part in self.description["observations"].items():
            key = name.partition(".")[2]
            if key and not (isinstance(observation, dict) and key in observation):
                raise ValueError(f"the observation must be a dict with the entry {key!r}")
            inputs[name], batched = as_input(name, observation[key] if key else observation, part)
        given = self.initial_state() if state is None else state
        state = {name: np.asarray(x) for name, x in given.items()} if isinstance(given, dict) else {}
        expected = {name: (x["shape"], x["dtype"]) for name, x in self.description["state"].items()}
        if {name: (list(x.shape), x.dtype) for name, x in state.items()} != expected:
            raise ValueError("state is not that of this agent: pass the one that predict returned")
        action, *new = self.session.run(None, inputs | {f"state.{name}": x for name, x in state.items()})
        if any(np.isnan(x).any() for x in (action, *new) if x.dtype.kind == "f"):
            raise ValueError("the action or the next state is NaN: an observation or the state is invalid")
        return (action if batched else action[0]), dict(zip(expected, new, strict=True))
