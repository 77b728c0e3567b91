"""Behavior policies that collect data, and the metadata of a dataset that they record."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.data import ReferenceScores
from rlxf.envs.specs import single_spec, spec_of
from rlxf.evaluation import evaluate
from rlxf.evaluation.agents import check_has_predict, has_compiled_step
from rlxf.evaluation.environment import reference_scores_of, with_training_normalization
from rlxf.evaluation.episodes import validate_targets
from rlxf.evaluation.seeding import action_seed
from rlxf.utils.warnings import warn_user

Agent = PolicyPredictor | None
SCORED_EPISODES = 100
"""Number of episodes to measure the mean return of a random policy, and of the agent."""
MONITOR = "stable_baselines3.common.monitor:Monitor"


@dataclass(frozen=True)
class BehaviorPolicy:
    """Behavior policy: an agent, a fraction of random actions, and a target return.

    Args:
        agent: object with SB3's ``predict``, or None for random actions.
        random_fraction: fraction of actions that are replaced by random ones, from 0 to 1.
        target_return: target return for `ReturnToGo`; None for an agent that is not conditioned on a return.

    Raises:
        TypeError: if the agent has no ``predict``.
        ValueError: if the fraction is out of range.
    """

    agent: Agent
    random_fraction: float = 0.0
    target_return: float | None = None

    def __post_init__(self) -> None:
        if self.agent is not None:
            check_has_predict(self.agent)
        if not 0 <= self.random_fraction <= 1:
            raise ValueError(
                f"mix must be fractions of random actions from 0 to 1, got {self.random_fraction}"
            )

    def __str__(self) -> str:
        if self.agent is None or self.random_fraction == 1:
            return "random actions"
        target = "" if self.target_return is None else f" with target return {self.target_return:g}"
        mixed = "" if self.random_fraction == 0 else f" with {self.random_fraction:.3g} of random actions"
        return type(self.agent).__name__ + target + mixed

    def make_policy(self, action_space: spaces.Space[Any], seed: int) -> PolicyPredictor:
        """Return an object with SB3's ``predict`` that acts according to this policy, except the target."""
        agent = None if self.random_fraction == 1 else self.agent
        return RandomizedPolicy(action_space, seed, agent, self.random_fraction)


def plan_policies(
    agents: Sequence[Agent], mix: Sequence[float], target_returns: Sequence[float] | None, episodes: int
) -> list[BehaviorPolicy]:
    """Return the policies of all combinations of agents, fractions of random actions and targets.

    Raises:
        ValueError: if a fraction or a target is out of range, there are no policies, or there are fewer
            episodes than policies.
        TypeError: if an agent has no ``predict``, or mix is not a sequence.
    """
    targets = [None] if target_returns is None else validate_targets(target_returns, None)
    if not isinstance(mix, Sequence | np.ndarray) or isinstance(mix, str):
        raise TypeError(f"mix must be a sequence of fractions, such as (0, 0.5), got {mix!r}")
    if len(mix) == 0:
        raise ValueError("mix must have at least one fraction of random actions, from 0 to 1, got none")
    policies = [BehaviorPolicy(*combination) for combination in product(agents, mix, targets)]
    if not policies:
        raise ValueError(f"there is no agent to record: got agents {list(agents)} and mix {list(mix)}")
    if episodes < len(policies):
        raise ValueError(
            f"episodes must be at least {len(policies)}, one for each combination of agent, fraction of "
            f"random actions and target return, got {episodes}"
        )
    return policies


class RandomizedPolicy:
    """Agent whose actions are replaced by random ones with probability ``fraction``, or only random actions.

    Random actions are uniform in the action space. The agent is not informed: its memory has the actions
    that it chose, not those that were taken.

    Args:
        action_space: action space of one environment.
        seed: seed of the random actions and of the choice of steps.
        agent: object with SB3's ``predict``; None if all actions are random.
        fraction: probability that an action of the agent is replaced, from 0 to 1.
    """

    def __init__(
        self, action_space: spaces.Space[Any], seed: int, agent: Agent = None, fraction: float = 1.0
    ):
        self._agent, self._fraction = agent, fraction
        self._space = deepcopy(action_space)
        self._space.seed(action_seed(seed))
        self._rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))

    @property
    def has_compiled_step(self) -> bool:
        """True if the acting step of the agent is compiled for a number of environments."""
        return has_compiled_step(self._agent)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], Any]:
        """Return actions (E, ...) and state like SB3; E is the length of ``episode_start``."""
        assert episode_start is not None
        if self._agent is None:
            return self._sample(len(episode_start)), None
        actions, state = self._agent.predict(observation, state, episode_start, deterministic)
        replaced = self._rng.random(len(actions)) < self._fraction
        if replaced.any():
            actions = np.array(actions)
            actions[replaced] = self._sample(len(actions))[replaced]
        return actions, state

    def _sample(self, n_envs: int) -> NDArray[Any]:
        return np.stack([self._space.sample() for _ in range(n_envs)])


def measure_reference_scores(best: BehaviorPolicy, env: VecEnv, seed: int) -> ReferenceScores | None:
    """Return the known scores (`reference_scores_of`), else measure a random policy (0) and the agent (100).

    The result is None without known scores if there is no agent, it is conditioned on a target return, or the
    95% intervals of the two mean returns overlap: their difference would then be noise, and scores huge.

    Warns:
        UserWarning: if the intervals overlap, or the agent is worse.
    """
    agent = best.agent
    known = reference_scores_of(best.agent, env)
    if known is not None or agent is None or best.target_return is not None:
        return known
    low = evaluate(RandomizedPolicy(env.action_space, seed), env, SCORED_EPISODES, seed=seed)
    high = evaluate(agent, with_training_normalization(agent, env), SCORED_EPISODES, seed=seed)
    name = type(agent).__name__
    if low.ci[1] >= high.ci[0]:
        warn_user(
            f"the mean return of {name}, {high.mean:.6g}, is not clearly above that of random actions, "
            f"{low.mean:.6g}: the dataset is stored without reference scores. Train the agent for longer, or "
            f"pass reference_scores=ReferenceScores(minimum, maximum, source)"
        )
        return None
    source = f"mean returns of a random policy and of {name} over {SCORED_EPISODES} episodes"
    return ReferenceScores(low.mean, high.mean, source)


def recreatable_spec(env: VecEnv) -> EnvSpec | None:
    """Return the spec of one of the environments; None, with a warning, if no spec recreates it.

    The spec must be serializable as JSON, which datasets store, and recreate the spaces of ``env``. This is
    not possible for wrappers with a function as an argument, or wrappers that do not record their arguments.
    SB3's ``Monitor`` is left out, because it does not change the results of steps.
    """
    reason = "the environment has no spec, as it was not created from an id"
    spec = None
    try:
        if (spec := spec_of(env)) is not None:
            return _single_spec(spec, env)
    except Exception as error:  # the spec of an arbitrary environment may fail in any way
        reason = f"the spec of the environment does not recreate it ({error!r})"
        if callable(getattr(spec, "entry_point", None)):
            reason += "; register it with entry_point='module:Class'"
    warn_user(
        f"{reason}: the dataset is stored without an environment, so pass env to evaluate agents that are "
        f"trained on it"
    )
    return None


def _single_spec(spec: EnvSpec, env: VecEnv) -> EnvSpec:
    """Return the spec of one environment of ``env``, after a check that it recreates the spaces."""
    wrappers = tuple(each for each in spec.additional_wrappers if each.entry_point != MONITOR)
    spec = replace(single_spec(spec), additional_wrappers=wrappers)
    recreated = gymnasium.make(EnvSpec.from_json(spec.to_json()))
    spaces = recreated.observation_space, recreated.action_space
    recreated.close()
    if spaces != (env.observation_space, env.action_space):
        raise ValueError(f"the spec of {spec.id} gives other spaces, {spaces}")
    return spec


def build_metadata(
    policies: Sequence[BehaviorPolicy],
    counts: Sequence[int],
    spec: EnvSpec | None,
    references: ReferenceScores | None,
    seed: int,
    author: str | None,
    algorithm_name: str | None,
) -> dict[str, Any]:
    """Return Minari metadata: policies and their episodes, seed, versions and reference scores.

    Args:
        policies: policies that were recorded.
        counts: number of episodes of each policy.
        spec: spec of the environment; None if unknown.
        references: reference scores; None if unknown.
        seed: seed of the recording.
        author: author of the dataset; None for no author.
        algorithm_name: algorithm name; None for the names of the agents' classes.
    """
    agents = [policy.agent for policy in policies]
    names = dict.fromkeys("random" if agent is None else type(agent).__name__ for agent in agents)
    played = "; ".join(f"{count} episodes of {each}" for each, count in zip(policies, counts, strict=True))
    env_name = "An environment without a spec" if spec is None else spec.id
    versions = f"Recorded by rlxf {version('rlxf')} with gymnasium {gymnasium.__version__}, seed {seed}."
    description = f"{env_name}: {played}. {versions}"
    metadata: dict[str, Any] = {"algorithm_name": algorithm_name or ", ".join(names)}
    if author is not None:
        metadata["author"] = {author}
    if references is not None:
        description += f" Reference scores: {references.source}."
        metadata |= {"ref_min_score": references.minimum, "ref_max_score": references.maximum}
        metadata["num_episodes_average_score"] = SCORED_EPISODES
    return metadata | {"description": description}
