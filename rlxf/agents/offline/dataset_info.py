"""Information about the data of an offline agent, which its files hold, and its environment."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from torch import nn

from rlxf.data import DatasetError, ReferenceScores, Trajectories, observation_encoder
from rlxf.data.encoders import ImageEncoder, VectorEncoder
from rlxf.data.space_comparison import space_mismatches
from rlxf.data.trajectories import default_normalization
from rlxf.envs.described_env import DescribedEnv
from rlxf.envs.specs import find_spec, registered_spec
from rlxf.training.json_rules import MAPPING, NOTHING, TEXT, TEXTS, Rule, check_fields, number, whole
from rlxf.training.spaces import space_from_json, space_to_json
from rlxf.training.strict_json import dump_json
from rlxf.utils.env_ids import is_other_version
from rlxf.utils.warnings import warn_user

_NUMBER = number()
RULES = {
    "dataset_ids": TEXTS,
    "observation_space": MAPPING,
    "action_space": MAPPING,
    "return_range": Rule(
        "a list of the smallest and the largest return",
        lambda x: isinstance(x, list) and len(x) == 2 and all(map(_NUMBER.holds, x)) and x[0] <= x[1],
    ),
    "env_id": TEXT | NOTHING,
    "env_kwargs": MAPPING,
    "max_episode_steps": whole() | NOTHING,
    "reference_scores": MAPPING | NOTHING,
    "env_wrappers": TEXTS,
    "fingerprint": TEXT,
}
"""Rules of the fields of `DatasetInfo` in a file."""
SCORE_RULES = {"minimum": _NUMBER, "maximum": _NUMBER, "source": TEXT}
"""Rules of the fields of `ReferenceScores` in a file."""


@dataclass(frozen=True)
class DatasetInfo:
    """Information about the dataset that an agent was trained on.

    Args:
        dataset_ids: Minari ids.
        observation_space: observation space of the dataset.
        action_space: action space of the dataset.
        return_range: smallest and largest return of an episode.
        env_id: Gymnasium id of the evaluation environment; None if the dataset names none.
        env_kwargs: arguments of the evaluation environment.
        max_episode_steps: time limit of the evaluation environment; None for no limit.
        reference_scores: scores for the normalization of returns; None if there are none.
        env_wrappers: names of the wrappers of the evaluation environment. Wrappers are code, so checkpoints
            do not contain them.
        fingerprint: result of `Trajectories.fingerprint`; training is resumed on equal data only.
    """

    dataset_ids: tuple[str, ...]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    return_range: tuple[float, float]
    env_id: str | None
    env_kwargs: dict[str, Any]
    max_episode_steps: int | None
    reference_scores: ReferenceScores | None
    env_wrappers: tuple[str, ...] = ()
    fingerprint: str = ""

    @classmethod
    def of(cls, trajectories: Trajectories) -> "DatasetInfo":
        """Return the information about these trajectories.

        Raises:
            DatasetError: if a file cannot hold the information.
        """
        spec = trajectories.eval_env_spec
        returns = trajectories.returns
        info = cls(
            dataset_ids=trajectories.dataset_ids,
            observation_space=trajectories.observation_space,
            action_space=trajectories.action_space,
            return_range=(float(returns.min()), float(returns.max())),
            env_id=None if spec is None else spec.id,
            env_kwargs={} if spec is None else dict(spec.kwargs),
            max_episode_steps=None if spec is None else spec.max_episode_steps,
            reference_scores=trajectories.reference_scores,
            env_wrappers=() if spec is None else tuple(wrapper.name for wrapper in spec.additional_wrappers),
            fingerprint=trajectories.fingerprint(),
        )
        info._check_storable()
        return info

    def _check_storable(self) -> None:
        """Raise DatasetError unless a file can hold this information."""
        try:
            dump_json(self.to_json())
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"a file cannot hold the description of {', '.join(self.dataset_ids)}: {error}; use numbers, "
                f"texts, lists and dicts as arguments of its environment (eval_env_spec.kwargs), got "
                f"{self.env_kwargs}"
            ) from error

    def space_mismatches(self, other: "DatasetInfo | Trajectories") -> Iterator[tuple[str, str]]:
        """Yield each difference of the spaces: "observation" or "action", and its description."""
        expected = self.observation_space, self.action_space
        return space_mismatches(expected, (other.observation_space, other.action_space))

    @property
    def encoder(self) -> VectorEncoder | ImageEncoder:
        """Encoder of observations as rows of an array."""
        return observation_encoder(self.observation_space)

    @property
    def env(self) -> DescribedEnv | None:
        """Evaluation environment as described by the dataset or the file; None if there is no description.

        ``render_mode`` is left out: it does not change the task, and the value "human" opens a window.

        Raises:
            ValueError: if the description is malformed.
        """
        if self.env_id is None:
            return None
        described = DescribedEnv(self.env_id, self.env_kwargs, self.max_episode_steps, self.env_wrappers)
        kwargs = {name: value for name, value in described.kwargs.items() if name != "render_mode"}
        return replace(described, kwargs=kwargs)

    def env_spec(self, trust: bool = False, given: Collection[str] = ()) -> EnvSpec | None:
        """Return the spec of the evaluation environment as registered in Gymnasium; None if there is none.

        Args:
            trust: use all arguments of the description, which may be paths or require much memory, and import
                the module of an id ``module:id``.
            given: names of arguments for which the caller gives values.

        Raises:
            ValueError: if the environment is not registered or the dataset's environment has wrappers. Also
                if, without trust, the description differs from the registered environment (`DescribedEnv`).
        """
        described = self.env
        if described is None:
            return None
        self._check_registered(described, find_spec if trust else registered_spec)
        if not trust:
            return described.local_spec(given)
        if described.wrappers:
            raise ValueError(
                f"the data are from {self.env_id!r} with the wrappers {', '.join(self.env_wrappers)}, which "
                f"a file does not contain: pass the environment, or load the agent with its dataset and "
                f"trust=True"
            )
        return described.trusted_spec()

    def _check_registered(self, described: DescribedEnv, find: Callable[[str], EnvSpec]) -> None:
        try:
            find(described.id)
        except ValueError as error:
            raise ValueError(
                f"the data are from {self.env_id!r}, which is not registered in Gymnasium: {error}. Import "
                f"the package that registers it, or give the environment as module:id (--env). The entry "
                f"point in the data is only run with --trust-data, in Python trust=True"
            ) from error

    def uninitialized_normalization(self) -> nn.Module:
        """Return a normalization layer for these observations with placeholder statistics."""
        return default_normalization(self.encoder)

    def to_json(self) -> dict[str, Any]:
        """Return the information as plain data."""
        scores = self.reference_scores
        return {
            **vars(self),
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            "reference_scores": None if scores is None else vars(scores),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], file_bytes: int = 0) -> "DatasetInfo":
        """Restore the information from the result of `to_json`.

        Args:
            data: result of `to_json`.
            file_bytes: bytes of the arrays in the file that contains it.

        Raises the errors of its parts, such as those of `space_from_json`.

        Raises:
            CheckpointError: if a field is missing or has a value that breaks its rule.
        """
        check_fields(data, RULES, "dataset_info")
        scores = data["reference_scores"]
        if scores is not None:
            check_fields(scores, SCORE_RULES, "reference_scores")
        fields = {
            "dataset_ids": tuple(data["dataset_ids"]),
            "observation_space": space_from_json(data["observation_space"], file_bytes),
            "action_space": space_from_json(data["action_space"], file_bytes),
            "return_range": tuple(data["return_range"]),
            "reference_scores": None if scores is None else ReferenceScores(**scores),
            "env_wrappers": tuple(data["env_wrappers"]),
        }
        return cls(**{**data, **fields})


def warn_on_version_mismatch(data_envs: Collection[str], env_id: str | None, warned: set[str]) -> None:
    """Warn once if an environment is another version of that of the data, e.g. Walker2d-v5 for Walker2d-v4.

    Versions may differ in dynamics and rewards even if their spaces are equal.

    Args:
        data_envs: Gymnasium ids of the environments of the data; empty if they are unknown.
        env_id: Gymnasium id of the environment in which the agent acts; None if it is unknown.
        warned: ids for which a warning was given; the new id is added.
    """
    if env_id is None or env_id in warned:
        return
    others = [each for each in data_envs if is_other_version(each, env_id)]
    if not others:
        return
    warned.add(env_id)
    recorded = " and ".join(data_envs)
    only = f"data from {env_id} only"
    warn_user(
        f"the data are from {recorded}, but the agent acts in {env_id}, another version of {others[0]}: "
        f"dynamics and rewards may differ, so returns are not comparable; use "
        f"{only if len(data_envs) > 1 else f'{others[0]}, or {only}'}"
    )
