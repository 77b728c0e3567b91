"""Checks of training in environments of tensors on an accelerator, for a process that has it."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback

from rlxf import GTrXLPPO
from rlxf.envs import FaultyEnvironmentError, TensorVecEnv, TMazeTensor
from rlxf.envs.spaces import map_parts
from rlxf.training import NumericalError
from tests.agents.gtrxl.worlds import ACTIONS, VECTOR, Scripted, make_loud, parameters, shifted
from tests.devices import accelerator
from tests.devices.accelerator import NAME
from tests.devices.agents import Meter, differences, gtrxl_agent
from tests.envs.tensor_envs import Tensors

SAME = AutoresetMode.SAME_STEP
N_STEPS = 8


class OnDevice(Tensors):
    """`Tensors` on the device, whose third step is changed.

    Args:
        env: vector environment of arrays.
        spoil: changes the results of the third step in place.
        fails_at: step that raises RuntimeError; 0 for none.
    """

    steps = 0

    def __init__(self, env: Any, spoil: Callable[..., None] = lambda *_: None, fails_at: int = 0):
        super().__init__(env)
        self.fails_at = fails_at
        self.device = torch.empty(0, device=NAME).device
        self.spoil = spoil

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed=seed, options=options)
        return self._moved(observations), infos

    def step(self, actions: Any) -> Any:
        *results, infos = super().step(actions.cpu())
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the simulator failed")
        if self.steps == 3:
            self.spoil(*results, infos)
        return *map(self._moved, results), self._moved(infos)

    def _moved(self, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: self._moved(value) for key, value in values.items()}
        return map_parts(values, lambda x: x.to(self.device))


def scripted(
    space: spaces.Space[Any] = VECTOR, spoil: Callable[..., None] = lambda *_: None, fails_at: int = 0
) -> OnDevice:
    """Return environments whose episodes end, or are truncated, at different times."""
    makes = [partial(Scripted, script, space, ACTIONS["Discrete"]) for script in shifted(3)]
    return OnDevice(SyncVectorEnv(makes, autoreset_mode=SAME), spoil, fails_at)


def agent(env: Any, **changes: Any) -> GTrXLPPO:
    """Return an agent for environments of tensors."""
    settings = {"env": lambda: env, "n_steps": N_STEPS, "learning_rate": 1e-2, "batch_size": 8}
    return make_loud(gtrxl_agent("default core", NAME, **(settings | changes)))


def tmaze_waits(mode: AutoresetMode, n_envs: int) -> tuple[list[tuple[bool, int]], list[int]]:
    """Return how often the program waits in the steps and minibatches of a T-Maze with episodes of 4 steps.

    Returns:
        For each environment step but the first of a rollout, whether an episode ended and the count; the
        counts of all minibatches but the first of an update.
    """
    one = agent(TMazeTensor(n_envs, 3, autoreset_mode=mode, device=NAME), batch_size=2 * n_envs)
    with accelerator.waits() as count:
        meter = EndMeter(count)
        one.learn(3 * N_STEPS * n_envs, meter)
    return meter.counted, differences(meter.minibatches)


class EndMeter(Meter):
    """`Meter` that also keeps whether an episode ended in a step, in ``counted``."""

    def __init__(self, count: Callable[[], int]):
        super().__init__(count)
        self.counted: list[tuple[bool, int]] = []

    def _on_step(self) -> bool:
        super()._on_step()
        if len(self.steps[-1]) > 1:
            before, after = self.steps[-1][-2:]
            self.counted.append((bool(self.locals["dones"].any()), after - before))
        return True


class Seen(BaseCallback):
    """Callback that keeps what callbacks are given, and counts the ends of rollouts.

    Args:
        at_step: is called with the agent after each step.
        stops_at: step at which it stops the training; None for never.
    """

    def __init__(self, at_step: Callable[[GTrXLPPO], None] = lambda _: None, stops_at: int | None = None):
        super().__init__()
        self.at_step = at_step
        self.stops_at = stops_at
        self.steps: list[Any] = []
        self.rollouts = 0

    def _on_step(self) -> bool:
        given = self.locals
        infos = [plain(info) for info in given["infos"]]
        self.steps.append(
            [given["dones"].tolist(), infos, *(given[x].tolist() for x in ("rewards", "new_obs"))]
        )
        self.at_step(self.model)
        return len(self.steps) != self.stops_at

    def _on_rollout_end(self) -> None:
        self.rollouts += 1


def plain(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info without times and tensors."""
    changed = dict(info)
    if "episode" in info:
        changed["episode"] = info["episode"]["r"], info["episode"]["l"]
        changed["terminal_observation"] = info["terminal_observation"].tolist()
    return changed


def trained(make: Callable[[], Any], deferred: bool) -> list[Any]:
    """Return weights, statistics of episodes and what callbacks saw of a training.

    Args:
        make: returns the environments.
        deferred: leave the checks on the device as by default; False to read them in each step.
    """
    one, seen = agent(make()), Seen()
    assert one.env.defers_checks
    with patch.object(TensorVecEnv, "defers_checks", new_callable=PropertyMock, return_value=deferred):
        one.learn(6 * N_STEPS * one.n_envs, seen)
    episodes = [
        plain({"episode": each, "terminal_observation": torch.zeros(0)}) for each in one.ep_info_buffer
    ]
    assert len(episodes) > 3
    return [[x.tolist() for x in parameters(one)], episodes, list(one.ep_success_buffer), seen.steps]


def equal_trainings(name: str) -> bool:
    """Return whether a training with deferred checks is that in which each step is read."""
    makes = {"T-Maze": lambda: TMazeTensor(3, 3, device=NAME), "scripts": scripted}
    return trained(makes[name], deferred=True) == trained(makes[name], deferred=False)


def fault(what: str, fails_at: int = 0, stops_at: int | None = None) -> tuple[str, int, bool]:
    """Return the error of a training whose third step is faulty.

    Args:
        what: name of a fault of `FAULTS`.
        fails_at: step that raises RuntimeError; 0 for none.
        stops_at: step at which a callback stops the training; None for never.

    Returns:
        Class and message of the error, the number of rollouts that ended, and whether the weights changed.
    """
    one, seen = agent(scripted(spoil=FAULTS[what], fails_at=fails_at)), Seen(stops_at=stops_at)
    before = [x.tolist() for x in parameters(one)]
    try:
        one.learn(4 * N_STEPS * one.n_envs, seen)
    except FaultyEnvironmentError as error:
        return (
            f"{type(error).__name__}: {error}",
            seen.rollouts,
            before != [x.tolist() for x in parameters(one)],
        )
    return "no error", seen.rollouts, True


def _spoil_observation(obs: Any, *_: Any) -> None:
    obs[1] = torch.nan


def _spoil_reward(obs: Any, rewards: Any, *_: Any) -> None:
    rewards[1] = torch.inf


def _lose_last(obs: Any, rewards: Any, terminated: Any, truncated: Any, infos: Any) -> None:
    terminated[1] = True
    infos.pop("final_obs", None)


def deferring() -> dict[str, bool]:
    """Return for spaces of observations whether the checks of a step are deferred."""
    kinds = {
        "Box": VECTOR,
        "Dict of Box": spaces.Dict({"vector": VECTOR}),
        "Discrete": spaces.Discrete(3),
        "Dict": spaces.Dict({"vector": VECTOR, "choice": spaces.Discrete(3)}),
    }
    return {name: TensorVecEnv(scripted(space)).defers_checks for name, space in kinds.items()}


FAULTS = {"observation": _spoil_observation, "reward": _spoil_reward, "final_obs": _lose_last}


def fault_of_outputs() -> str:
    """Return the error of a training whose memory becomes NaN after the second step."""

    def spoil(one: GTrXLPPO) -> None:
        if one.num_timesteps == 2 * one.n_envs:
            for layer in one.collector.state.cache.layers:
                layer.values.fill_(float("nan"))

    one = agent(TMazeTensor(3, 20, device=NAME))
    try:
        one.learn(64, Seen(spoil))
    except NumericalError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
