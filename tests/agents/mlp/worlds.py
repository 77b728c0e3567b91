"""Small agents with a multilayer perceptron, and replays of their data."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlxf import BehaviorCloning, ReturnConditionedMLP
from rlxf.data import Trajectories
from tests.agents.decision_transformer.worlds import make_loud, shown, some_trajectories

LENGTHS = (9, 1, 4, 14, 2, 3, 5, 1, 6, 2, 7, 3)
AGENTS: dict[str, Any] = {"BehaviorCloning": BehaviorCloning, "ReturnConditionedMLP": ReturnConditionedMLP}


def small_mlp(name: str = "BehaviorCloning", trajectories: Trajectories | None = None, **changes: Any) -> Any:
    """Return an agent with noise on every weight, so that actions depend on observations."""
    data = some_trajectories(lengths=LENGTHS) if trajectories is None else trajectories
    settings: dict[str, Any] = {"hidden_sizes": (12, 8), "batch_size": 8, "seed": 3, "device": "cpu"}
    return make_loud(AGENTS[name](data, **(settings | changes)))


def environment_rows(agent: Any, data: Trajectories, steps: NDArray[np.int64]) -> Any:
    """Return the observations of the environment of the agent at these steps of the dataset."""
    return shown(data, steps) if agent.return_conditioned else data.encoder.decode(data.observations[steps])


def replayed(agent: Any, data: Trajectories) -> NDArray[Any]:
    """Return the actions (steps, ...) that the agent chooses step by step on the dataset."""
    actions = np.zeros((data.steps, *(data.action_space.shape or ())), data.action_space.dtype)
    state = None
    for t in range(int(data.lengths.max())):
        steps = np.minimum(data.offsets[:-1] + t, data.offsets[1:] - 1)
        starts = np.full(data.episodes, t == 0)
        chosen, state = agent.predict(environment_rows(agent, data, steps), state, starts)
        active = t < data.lengths
        actions[steps[active]] = chosen[active]
    return actions
