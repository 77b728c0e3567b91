"""Environments in processes of their own, under the interface of Stable-Baselines3."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from rlxf.envs.infos import BROKEN, LOST, row_of
from rlxf.envs.workers.crew import Crew, broken_error, closed_if_it_fails, named
from rlxf.envs.workers.options import Workers
from rlxf.envs.workers.serving import Call, Fault, Make, call

STANDING = ("seed", "restarts", "lost_steps")
"""What is counted of an environment, and what its restarts are seeded by."""
REPLAYED = 1000
"""Steps that may be played again within the time that one may take at most."""


class Row(NamedTuple):
    """What one environment gives in a step; the observation is (1, ...)."""

    observation: Any
    reward: float
    done: bool
    info: dict[str, Any]


class WorkerVecEnv(VecEnv):
    """As `DummyVecEnv`, and step for step the same, but in processes that may raise, die or hang.

    An environment that breaks begins a fresh episode, in a process of its own, while the others go on. Up to
    then it stands still: its observation stays the last one, it is paid 0, nothing ends. These steps are
    *lost*: ``infos[i]`` has "filler" and "Workers.lost", both True, and

    - in the first, "Workers.broken": the cause. An action was chosen, but nobody knows what came of it.
    - in all but the last, "filler_next": the next step is lost, too.
    - the last brings the first observation of the new episode, as each end does here: ``dones[i]`` is True,
      with ``terminal_observation``, the one that stayed, and ``TimeLimit.truncated``, but without
      ``episode``: what broke is no finished episode.

    So the steps before the break are those of an episode that was truncated, and `GTrXLPPO` learns from them
    as such: its estimate V of the last observation stands for what would have come. It leaves lost steps out
    of the loss and forgets what it remembered. Learners that know nothing of lost steps see an episode in
    which nothing happens for a while, and which is truncated then. If all environments are lost at once,
    ``step_wait`` waits for the first to be back.

    It does not matter what finds an environment broken: a step, or a question such as `get_attr`, which is
    asked again once the environment is back.

    A restart has a fresh seed, made of that of the environment and the number of its restarts.

    The same steps for any number of processes have environments that draw from a generator of their own, as
    ``np_random``. Those of a process share the global ones of Python, NumPy and torch, which are seeded with
    each reset that has a seed: what is drawn from these is the same again for the same seed and number of
    processes, as long as nothing breaks and no run is resumed.

    What goes to and fro is pickled: in both directions between a program and its own processes. These do not
    run the program's script again. What is defined there comes with ``makes``; what is registered there by an
    id, such as an environment, they do not know: give its class, or the spec, ``gymnasium.spec(id)``.

    Args:
        makes: functions that make one environment each.
        workers: how many processes, and how patient.

    Raises:
        BrokenEnvironmentError: if an environment cannot be made, and no process is left then. Later, if its
            first reset fails, or if it breaks more often in a row than ``workers.restarts``: the processes
            are there until `close`.
        ValueError: if there are more processes than environments.
    """

    def __init__(self, makes: Sequence[Make], workers: Workers):
        self.crew = Crew(makes, workers)
        self._lost_steps = [0] * len(makes)
        self._begun = False
        self._owed = np.zeros(len(makes), np.bool_)
        self._playing: list[int] = []
        self._first: dict[int, Any] = {}
        with closed_if_it_fails(self.crew):
            spaces = self._all({i: call("spaces") for i in range(len(makes))})
            super().__init__(len(makes), *spaces[0])
        nothing = create_empty_array(self.observation_space, 1, np.zeros)
        self._shown: list[Any] = [nothing] * len(makes)

    @property
    def restarts(self) -> int:
        """Of all environments."""
        return sum(self.crew.restarts)

    @property
    def lost_steps(self) -> int:
        """Of all environments."""
        return sum(self._lost_steps)

    def reset(self) -> VecEnvObs:
        """First observations of all environments, with the seed and options set before."""
        self._wait_for(range(self.num_envs))
        self._first.clear()
        for i, seed in enumerate(self._seeds):
            self.crew.seeds[i] = self.crew.seeds[i] if seed is None else seed
        asked = zip(self._seeds, self._options, strict=True)
        first = self._all({i: call("reset", *each) for i, each in enumerate(asked)})
        self._begun = True
        self._reset_seeds()
        self._reset_options()
        self._wait_for(range(self.num_envs))
        for i, (observation, info) in (first | self._first).items():
            self._shown[i], self.reset_infos[i] = observation, info
        self._first.clear()
        self._owed[:] = False
        return stacked(self._shown)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Send the actions, (N, ...), to the environments that play."""
        lost = self._first.keys() | set(np.flatnonzero(self._owed).tolist())
        self._playing = sorted(self.crew.up - lost)
        self.crew.ask({i: call("step", actions[i : i + 1]) for i in self._playing})

    def step_wait(self) -> VecEnvStepReturn:
        """What the step gave; see the class for the environments that broke."""
        played = self._without_faults(self.crew.answers(self.crew.workers.timeout))
        self._welcome()
        while not (self._playing or self._first):
            self.crew.wait()
            self._welcome()
        rows = [self._played(i, played[i]) if i in played else self._lost(i) for i in range(self.num_envs)]
        observations, rewards, dones, infos = zip(*rows, strict=True)
        return stacked(observations), np.array(rewards, np.float32), np.array(dones), list(infos)

    def close(self) -> None:
        """Close the environments, and end the processes."""
        self.crew.close()

    def get_images(self) -> list[Any]:
        """One picture of each environment, for ``render_mode="rgb_array"``."""
        return self._ask(None, call("ask", "get_images"), self.crew.workers.timeout)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute of each chosen environment."""
        return self._ask(indices, call("ask", "get_attr", attr_name), self.crew.workers.timeout)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute in each chosen environment; one that begins anew later has it no more."""
        self._ask(indices, call("tell", "set_attr", attr_name, value), self.crew.workers.timeout)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each chosen environment, which may take ``workers.start_timeout``.

        It is called again where the environment broke meanwhile: all that it did there went with the process.
        What it did elsewhere, such as in a file, is done twice.

        Raises:
            AttributeError: if there is none.
            RuntimeError: if it raises.
            BrokenEnvironmentError: if the environment breaks more often in a row than ``workers.restarts``.
        """
        question = call("ask", "env_method", method_name, *method_args, **method_kwargs)
        return self._ask(indices, question, self.crew.start_timeout)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Whether each chosen environment is wrapped."""
        return self._ask(indices, call("ask", "env_is_wrapped", wrapper_class), self.crew.workers.timeout)

    def absent(self) -> dict[int, dict[str, Any]]:
        """What `take_up` needs of environments that are between two episodes since they broke.

        Returns:
            By environment: "absent", whether that was told already, and "shown", the arrays of its last
            observation, (1, ...), by the key of a Dict, the number in a Tuple, or "".
        """
        self._without_faults(self.crew.dead())
        lost = set(range(self.num_envs)) - self.crew.up | set(self._first)
        return {i: {"absent": bool(self._owed[i]), "shown": self._arrays(i)} for i in sorted(lost)}

    def standing(self) -> list[dict[str, Any]]:
        """What `stand_behind` needs of each environment, as JSON."""
        seeds = [None if seed is None else int(seed) for seed in self.crew.seeds]
        each = zip(seeds, self.crew.restarts, self._lost_steps, strict=True)
        return [dict(zip(STANDING, numbers, strict=True)) for numbers in each]

    def replay(self, records: Mapping[int, dict[str, Any]]) -> dict[int, str | None]:
        """Play episodes again, all at once: `rlxf.envs.Replayable.replay` of each environment.

        A process may take ``workers.start_timeout`` for each of its environments, and ``workers.timeout`` for
        each `REPLAYED` steps.

        Args:
            records: of each episode, by environment.

        Returns:
            None for each that is the same, else why it is not; one that breaks is not, and begins anew.
        """
        self._wait_for(records)
        asked = {i: call("ask", "env_method", "replay", record) for i, record in records.items()}
        steps = sum(len(record["actions"]) for record in records.values())
        self.crew.ask(asked)
        results = self.crew.answers(self.crew.start_timeout + self.crew.workers.timeout * steps / REPLAYED)
        self._without_faults(results)
        found = {i: result for i, result in results.items() if isinstance(result, Fault)}
        return results | {i: f"{named([i])} {fault.cause}" for i, fault in found.items()}

    def stand_behind(self, standing: Sequence[Mapping[str, Any]]) -> None:
        """Count on from `standing` in another process, and seed restarts as there; the episodes stay."""
        rows = zip(*([each[name] for name in STANDING] for each in standing), strict=True)
        self.crew.seeds[:], self.crew.restarts[:], self._lost_steps[:] = rows

    def take_up(self, absent: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on in another process, without a reset; those that were `absent` begin fresh episodes."""
        self._begun = True
        for i, each in absent.items():
            self._owed[i], self.crew.causes[i] = each["absent"], "was broken when the run was saved"
            self._shown[i] = self._of_arrays(each["shown"])
        self._first |= self._all({i: self.crew.fresh_reset(i) for i in absent})

    def _arrays(self, i: int) -> dict[str, np.ndarray]:
        shown, (keys, *_) = self._shown[i], obs_space_info(self.observation_space)
        return {"": shown} if keys == [None] else {str(key): shown[key] for key in keys}

    def _of_arrays(self, arrays: Mapping[str, np.ndarray]) -> VecEnvObs:
        keys, *_ = obs_space_info(self.observation_space)
        parts = {key: arrays["" if key is None else str(key)] for key in keys}
        return dict_to_obs(self.observation_space, parts)

    def _played(self, i: int, result: tuple[VecEnvStepReturn, dict[str, Any]]) -> Row:
        (observation, rewards, dones, infos), self.reset_infos[i] = result
        self._shown[i] = observation
        self.crew.played(i, ended=bool(dones[0]))
        return Row(observation, rewards[0], bool(dones[0]), infos[0])

    def _lost(self, i: int) -> Row:
        self._lost_steps[i] += 1
        if self._owed[i] and i in self._first:
            return self._back(i)
        told = {} if self._owed[i] else {BROKEN: self.crew.causes[i]}
        self._owed[i] = True
        info = {"filler": True, LOST: True, "filler_next": True} | told
        return Row(self._shown[i], 0.0, False, info)

    def _back(self, i: int) -> Row:
        last, self._owed[i] = row_of(self._shown[i], 0), False
        self._shown[i], self.reset_infos[i] = self._first.pop(i)
        info = {"filler": True, LOST: True, "terminal_observation": last, "TimeLimit.truncated": True}
        return Row(self._shown[i], 0.0, True, info)

    def _all(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Results of what takes each environment a while; before the first reset, nothing may go wrong."""
        self.crew.ask(calls)
        results = self.crew.answers(self.crew.start_timeout)
        faults = {i: result for i, result in results.items() if isinstance(result, Fault)}
        if faults and not self._begun:
            fault = faults[min(faults)]
            raise broken_error([i for i, other in faults.items() if other is fault], fault)
        return self._without_faults(results)

    def _ask(self, indices: VecEnvIndices, question: Call, seconds: float) -> list[Any]:
        """Answers of the chosen environments; of those that break meanwhile, once they have begun anew."""
        chosen = list(self._get_indices(indices))
        answers: dict[int, Any] = {}
        while missing := [i for i in chosen if i not in answers]:
            self._wait_for(missing)
            self.crew.ask(dict.fromkeys(missing, question))
            answers |= self._answered(self.crew.answers(seconds))
        return [answers[i] for i in chosen]

    def _answered(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Answers of those that did not break; what raised when it was asked is as it was before."""
        broken = {i: result for i, result in results.items() if isinstance(result, Fault) and result.fatal}
        self._without_faults(broken)
        answers = {i: result for i, result in results.items() if i not in broken}
        for i, answer in answers.items():
            if isinstance(answer, Fault):
                error = broken_error([i], answer)
                raise (AttributeError if answer.error == "AttributeError" else RuntimeError)(
                    str(error)
                ) from error
        return answers

    def _wait_for(self, environments: Iterable[int]) -> None:
        while not self.crew.up.issuperset(environments):
            self.crew.wait()
            self._welcome()

    def _welcome(self) -> None:
        """Take in the first observations of those that are back."""
        self._first |= self._without_faults(self.crew.returned())

    def _without_faults(self, results: Mapping[int, Any]) -> dict[int, Any]:
        faults = {i: result for i, result in results.items() if isinstance(result, Fault)}
        self.crew.restart(faults)
        for i in faults:
            self._first.pop(i, None)
        return {i: result for i, result in results.items() if i not in faults}


def trouble(env: VecEnv) -> dict[str, int]:
    """How many restarts and lost steps there were, by name; nothing where environments have no workers."""
    inner = env.unwrapped
    if not isinstance(inner, WorkerVecEnv):
        return {}
    return {"restarts": inner.restarts, "lost_steps": inner.lost_steps}


def stacked(rows: Sequence[Any]) -> VecEnvObs:
    """Observations (1, ...) of N environments as one batch (N, ...)."""
    if isinstance(rows[0], dict):
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(np.concatenate(part) for part in zip(*rows, strict=True))
    return np.concatenate(rows)
