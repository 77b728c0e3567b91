"""Stable-Baselines3 `VecEnv` of environments in worker processes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from rlxf.envs.infos import BROKEN, LOST
from rlxf.envs.sb3_vec_env import Make
from rlxf.envs.spaces import concatenate_observations, observation_from_parts, observation_parts, row_of
from rlxf.envs.worker_pool import WorkerPool, Workers, close_on_error, env_label, failure_error
from rlxf.envs.worker_process import Call, call, failures_of

REPLAY_STEPS_PER_TIMEOUT = 1000
"""Number of replayed steps for which `WorkerVecEnv.replay` adds one ``workers.timeout``."""


_Row = tuple[Any, float, bool, dict[str, Any]]
"""Observation (1, ...), reward, done flag and info of one environment in a step."""


class WorkerVecEnv(VecEnv):
    """Vector environment with the same steps as `DummyVecEnv`, in worker processes that are restarted.

    If an environment raises, or its process dies or hangs, it restarts with a new episode in a new process,
    while the others continue. Until then, it repeats its last observation with reward 0 and no end. These
    steps are *lost*: ``infos[i]`` has "filler" and "Workers.lost", both True, and

    - in the first lost step, "Workers.broken": the cause. The result of the chosen action is unknown.
    - in all but the last lost step, "filler_next": the next step is lost, too.
    - The last lost step has the first observation of the new episode, like any end of an episode:
      ``dones[i]`` is True, with ``terminal_observation`` (the repeated one) and ``TimeLimit.truncated``, but
      without ``episode``, because the failed episode did not finish.

    So the steps before the failure form a truncated episode. `GTrXLPPO` treats them as one: it bootstraps
    with the value V of the last observation, masks lost steps in the loss, and resets its memory. Other
    learners see an episode whose observation is constant for some steps, and which is then truncated. If
    all environments are lost at once, ``step_wait`` waits until the first has restarted.

    A step or a query such as `get_attr` can detect the failure. A query is repeated after the restart.

    A restart has a new seed, derived from the seed of the environment and the number of its restarts. An
    environment with a persistent state (`ActionReplay`), such as the stage of a curriculum, continues with
    that at the end of its last episode.

    If environments draw from their own generator, such as ``np_random``, the steps are the same for any
    number of processes. Environments in a process share the global generators of Python, NumPy and torch,
    which are seeded at each reset with a seed. Draws from these are reproducible for the same seed and number
    of processes, as long as no environment fails and no run is resumed.

    Messages between the program and its processes are pickled. The processes do not run the program's
    script. Definitions of the script are sent with ``makes``, but ids that the script registers are unknown
    in the processes: use the class of the environment or its spec, ``gymnasium.spec(id)``.

    Args:
        makes: functions that create one environment each.
        workers: number of processes, timeouts and restarts.

    Raises:
        BrokenEnvironmentError: if an environment cannot be created; all processes are then ended. Later, if
            its first reset fails, or it has more consecutive failures than ``workers.max_restarts``; the
            processes then run until `close`.
        ValueError: if there are more processes than environments.
    """

    def __init__(self, makes: Sequence[Make], workers: Workers):
        self.pool = WorkerPool(makes, workers)
        self._lost_steps = [0] * len(makes)
        self._was_reset = False
        self._is_lost = np.zeros(len(makes), np.bool_)
        self._stepped: list[int] = []
        self._first_results: dict[int, Any] = {}
        with close_on_error(self.pool):
            spaces = self._call_all({i: call("spaces") for i in range(len(makes))})
            super().__init__(len(makes), *spaces[0])
        zeros = create_empty_array(self.observation_space, 1, np.zeros)
        self._last_observations: list[Any] = [zeros] * len(makes)

    @property
    def restarts(self) -> int:
        """Number of restarts of all environments."""
        return sum(self.pool.restart_counts)

    @property
    def lost_steps(self) -> int:
        """Number of lost steps of all environments."""
        return sum(self._lost_steps)

    def reset(self) -> VecEnvObs:
        """Return the first observations of all environments, with the seed and options set before."""
        self._wait_for(range(self.num_envs))
        self._first_results.clear()
        for i, seed in enumerate(self._seeds):
            self.pool.seeds[i] = self.pool.seeds[i] if seed is None else seed
        arguments = zip(self._seeds, self._options, strict=True)
        results = self._call_all({i: call("reset", *each) for i, each in enumerate(arguments)})
        self._was_reset = True
        self._reset_seeds()
        self._reset_options()
        self._wait_for(range(self.num_envs))
        for i, (observation, info) in (results | self._first_results).items():
            self._last_observations[i], self.reset_infos[i] = observation, info
        self._first_results.clear()
        self._is_lost[:] = False
        return concatenate_observations(self._last_observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Send the actions, (N, ...), to the environments that are not lost."""
        lost = self._first_results.keys() | set(np.flatnonzero(self._is_lost).tolist())
        self._stepped = sorted(self.pool.available - lost)
        self.pool.send_calls({i: call("step", actions[i : i + 1]) for i in self._stepped})

    def step_wait(self) -> VecEnvStepReturn:
        """Return the results of the step; the class docstring describes those of failed environments."""
        results = self._restart_failed(self.pool.receive(self.pool.workers.timeout))
        self._collect_restarted()
        while not (self._stepped or self._first_results):
            self.pool.wait()
            self._collect_restarted()
        rows = [
            self._played_row(i, results[i]) if i in results else self._lost_row(i)
            for i in range(self.num_envs)
        ]
        observations, rewards, dones, infos = zip(*rows, strict=True)
        return (
            concatenate_observations(observations),
            np.array(rewards, np.float32),
            np.array(dones),
            list(infos),
        )

    def close(self) -> None:
        """Close the environments, and end the processes."""
        self.pool.close()

    def get_images(self) -> list[Any]:
        """Return one image of each environment, for ``render_mode="rgb_array"``."""
        return self._query(None, call("query", "get_images"))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return the attribute of each selected environment."""
        return self._query(indices, call("query", "get_attr", attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute in each selected environment; a later restart loses it."""
        self._query(indices, call("query", "set_attr", attr_name, value))

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each selected environment, with the timeout ``workers.start_timeout``.

        If the process of an environment is lost during the call, the method is called again after the
        restart. Side effects outside the process, for example on files, then happen twice.

        Raises:
            AttributeError: if the environment has no such method.
            RuntimeError: if the method raises.
            BrokenEnvironmentError: if the environment has more consecutive failures than
                ``workers.max_restarts``.
        """
        query = call("query", "env_method", method_name, *method_args, **method_kwargs)
        return self._query(indices, query, self.pool.start_timeout)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return whether each selected environment is wrapped in the class."""
        return self._query(indices, call("query", "env_is_wrapped", wrapper_class))

    def failed_envs(self) -> dict[int, dict[str, Any]]:
        """Return the state, for `load_failed_envs`, of failed environments that have no new episode yet.

        Returns:
            By environment: "failure_reported", whether a step reported the failure already.
        """
        self._restart_failed(self.pool.find_dead())
        lost = set(range(self.num_envs)) - self.pool.available | set(self._first_results)
        return {i: {"failure_reported": bool(self._is_lost[i])} for i in sorted(lost)}

    def last_observations(self) -> list[dict[str, Any]]:
        """Return the last observation of each environment, which it repeats if it fails.

        Returns:
            Arrays (1, ...) of each environment by the key of a Dict, the index in a Tuple, or "".
        """
        return [observation_parts(observation) for observation in self._last_observations]

    def load_last_observations(self, parts: Mapping[int, dict[str, Any]]) -> None:
        """Load the `last_observations` of some environments."""
        for i, each in parts.items():
            self._last_observations[i] = observation_from_parts(self.observation_space, each)

    def restart_state(self) -> list[dict[str, Any]]:
        """Return seed, restarts, lost steps and persistent state of each environment as JSON.

        This is for `load_restart_state`.
        """
        pool = self.pool
        rows = zip(pool.seeds, pool.restart_counts, self._lost_steps, pool.persistent_states, strict=True)
        return [
            {"seed": None if seed is None else int(seed), "restarts": restarts, "lost_steps": lost_steps}
            | ({} if state is None else {"persistent_state": state})
            for seed, restarts, lost_steps, state in rows
        ]

    def replay(self, records: Mapping[int, dict[str, Any]]) -> dict[int, str | None]:
        """Replay episodes in parallel, with `rlxf.envs.ActionReplay.replay` of each environment.

        The timeout of a process is ``workers.start_timeout`` for each of its environments, plus
        ``workers.timeout`` for each `REPLAY_STEPS_PER_TIMEOUT` steps of all episodes.

        Args:
            records: record of each episode, by environment.

        Returns:
            None for each episode that is the same, else the reason why it is not. An environment that fails
            is restarted.
        """
        self._wait_for(records)
        calls = {i: call("query", "env_method", "replay", record) for i, record in records.items()}
        steps = sum(len(record["actions"]) for record in records.values())
        self.pool.send_calls(calls)
        results = self.pool.receive(
            self.pool.start_timeout + self.pool.workers.timeout * max(steps, 1) / REPLAY_STEPS_PER_TIMEOUT
        )
        self._restart_failed(results)
        failures = failures_of(results)
        return results | {i: f"{env_label([i])} {failure.cause}" for i, failure in failures.items()}

    def load_restart_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of `restart_state`, except for persistent states; episodes are unchanged."""
        self.pool.seeds[:] = [state["seed"] for state in states]
        self.pool.restart_counts[:] = [state["restarts"] for state in states]
        self._lost_steps[:] = [state["lost_steps"] for state in states]

    def load_persistent_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the persistent states of `restart_state`, with which environments restart."""
        self.pool.persistent_states[:] = [state.get("persistent_state") for state in states]

    def load_failed_envs(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Resume without a reset; the environments in ``states``, from `failed_envs`, start new episodes."""
        self._was_reset = True
        for i, state in states.items():
            self._is_lost[i] = state["failure_reported"]
            self.pool.causes[i] = "had failed when the run was saved"
        self._first_results |= self._call_all({i: self.pool.new_reset_call(i) for i in states})

    def _played_row(self, i: int, result: tuple[VecEnvStepReturn, dict[str, Any], Any]) -> _Row:
        (observation, rewards, dones, infos), self.reset_infos[i], state = result
        if state is not None:
            self.pool.persistent_states[i] = state
        self._last_observations[i] = observation
        self.pool.count_step(i, ended=bool(dones[0]))
        return observation, rewards[0], bool(dones[0]), infos[0]

    def _lost_row(self, i: int) -> _Row:
        self._lost_steps[i] += 1
        if self._is_lost[i] and i in self._first_results:
            return self._last_lost_row(i)
        cause = {} if self._is_lost[i] else {BROKEN: self.pool.causes[i]}
        self._is_lost[i] = True
        info = {"filler": True, LOST: True, "filler_next": True} | cause
        return self._last_observations[i], 0.0, False, info

    def _last_lost_row(self, i: int) -> _Row:
        last, self._is_lost[i] = row_of(self._last_observations[i], 0), False
        self._last_observations[i], self.reset_infos[i] = self._first_results.pop(i)
        info = {"filler": True, LOST: True, "terminal_observation": last, "TimeLimit.truncated": True}
        return self._last_observations[i], 0.0, True, info

    def _call_all(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Return the results of slow calls; before the first reset, a fault raises an error."""
        self.pool.send_calls(calls)
        results = self.pool.receive(self.pool.start_timeout)
        failures = failures_of(results)
        if failures and not self._was_reset:
            first = failures[min(failures)]
            raise failure_error([i for i, failure in failures.items() if failure is first], first)
        return self._restart_failed(results)

    def _query(self, indices: VecEnvIndices, query: Call, seconds: float | None = None) -> list[Any]:
        """Return the replies of the selected environments, after a restart of those that fail meanwhile.

        The timeout ``seconds`` is ``workers.timeout`` by default.
        """
        selected = list(self._get_indices(indices))
        replies: dict[int, Any] = {}
        while missing := [i for i in selected if i not in replies]:
            self._wait_for(missing)
            self.pool.send_calls(dict.fromkeys(missing, query))
            replies |= self._check_replies(self.pool.receive(seconds or self.pool.workers.timeout))
        return [replies[i] for i in selected]

    def _check_replies(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Restart environments whose process was lost, raise an exception of a query, and return the rest.

        An environment that raises in a query is not restarted.
        """
        fatal = {i: failure for i, failure in failures_of(results).items() if failure.fatal}
        self._restart_failed(fatal)
        replies = {i: result for i, result in results.items() if i not in fatal}
        for i, failure in failures_of(replies).items():
            error = failure_error([i], failure)
            kind = AttributeError if failure.error == "AttributeError" else RuntimeError
            raise kind(str(error)) from error
        return replies

    def _wait_for(self, environments: Iterable[int]) -> None:
        while not self.pool.available.issuperset(environments):
            self.pool.wait()
            self._collect_restarted()

    def _collect_restarted(self) -> None:
        """Store the first results of the environments that have restarted."""
        self._first_results |= self._restart_failed(self.pool.collect_restarted())

    def _restart_failed(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Schedule restarts for the failures among the results, and return the other results."""
        failures = failures_of(results)
        self.pool.schedule_restarts(failures)
        for i in failures:
            self._first_results.pop(i, None)
        return {i: result for i, result in results.items() if i not in failures}


def restart_counts(env: VecEnv) -> dict[str, int]:
    """Return the numbers of restarts and lost steps, by name; empty without worker processes."""
    inner = env.unwrapped
    if not isinstance(inner, WorkerVecEnv):
        return {}
    return {"restarts": inner.restarts, "lost_steps": inner.lost_steps}
