"""Settings of offline agents: training arguments, and information about the dataset."""

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from rlxf.agents.common.checkpoint import MAX_SEED, SEED_RULE, SEED_VALUE, setting_rules
from rlxf.attention.registry import technique_to_json
from rlxf.attention.technique import check_int
from rlxf.data import DatasetError, ReferenceScores, Trajectories, observation_encoder
from rlxf.data.encoders import ImageEncoder, VectorEncoder
from rlxf.data.sampling import SAMPLINGS, UNIFORM_STEPS, Sampling, SamplingScheme, sampling_from_json
from rlxf.data.spaces import space_mismatches
from rlxf.data.splits import check_fraction
from rlxf.data.trajectories import ScaleImages, Standardize
from rlxf.envs.specs import DescribedEnv, env_id_of, find_spec, registered_spec
from rlxf.training import CheckpointError
from rlxf.training.compat import NOTHING, Rule, number, whole
from rlxf.training.schedules import schedule_from_json, schedule_to_json, schedule_to_text
from rlxf.training.spaces import space_from_json, space_to_json
from rlxf.utils.env_ids import is_other_version


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

    @classmethod
    def of(cls, trajectories: Trajectories) -> "DatasetInfo":
        """Return the information about these trajectories.

        Raises:
            DatasetError: if a return-to-go is NaN or infinite.
        """
        _check_returns(trajectories)
        spec = trajectories.eval_env_spec
        returns = trajectories.returns
        return cls(
            dataset_ids=trajectories.dataset_ids,
            observation_space=trajectories.observation_space,
            action_space=trajectories.action_space,
            return_range=(float(returns.min()), float(returns.max())),
            env_id=None if spec is None else spec.id,
            env_kwargs={} if spec is None else dict(spec.kwargs),
            max_episode_steps=None if spec is None else spec.max_episode_steps,
            reference_scores=trajectories.reference_scores,
            env_wrappers=() if spec is None else tuple(wrapper.name for wrapper in spec.additional_wrappers),
        )

    def space_mismatches(self, other: "DatasetInfo") -> Iterator[tuple[str, str]]:
        """Yield each difference of the spaces: "observation" or "action", and its description."""
        own = self.observation_space, self.action_space
        return space_mismatches(own, (other.observation_space, other.action_space))

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
        if isinstance(self.encoder, ImageEncoder):
            return ScaleImages()
        width = self.encoder.shape
        return Standardize(np.zeros(width, np.float32), np.ones(width, np.float32))

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
        """
        scores = data["reference_scores"]
        fields = {
            "dataset_ids": tuple(data["dataset_ids"]),
            "observation_space": space_from_json(data["observation_space"], file_bytes),
            "action_space": space_from_json(data["action_space"], file_bytes),
            "return_range": tuple(data["return_range"]),
            "reference_scores": None if scores is None else ReferenceScores(**scores),
            "env_wrappers": tuple(data.get("env_wrappers", ())),
        }
        return cls(**{**data, **fields})


def _check_returns(trajectories: Trajectories) -> None:
    """Raise DatasetError unless all returns-to-go are finite; those of Minari datasets always are."""
    finite = np.isfinite(trajectories.return_to_go)
    if not finite.all():
        step = int(np.argmin(finite))
        raise DatasetError(
            f"the return to go of step {step} is {trajectories.return_to_go[step]}; correct the rewards of "
            f"that episode"
        )


def warn_on_version_mismatch(data_envs: Collection[str], env: VecEnv, warned: set[str]) -> None:
    """Warn once if an environment is another version of that of the data, e.g. Walker2d-v5 for Walker2d-v4.

    Versions may differ in dynamics and rewards even if their spaces are equal.

    Args:
        data_envs: Gymnasium ids of the environments of the data; empty if they are unknown.
        env: the environments in which the agent acts.
        warned: ids for which a warning was given; the new id is added.
    """
    env_id = env_id_of(env)
    if env_id is None or env_id in warned:
        return
    others = [each for each in data_envs if is_other_version(each, env_id)]
    if not others:
        return
    warned.add(env_id)
    recorded = " and ".join(data_envs)
    warnings.warn(
        f"the data are from {recorded}, but the agent acts in {env_id}, another version of {others[0]}: "
        f"dynamics and rewards may differ, so returns are not comparable; use {others[0]}, or data from "
        f"{env_id} only",
        stacklevel=4,
    )


Plain = bool | int | float | str
Converter = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Arguments of the constructor of an offline agent that its checkpoints hold.

    The meaning of each argument is that of `rlxf.DecisionTransformer`. Files leave out arguments that have a
    default here and this value.
    """

    BOUNDS: ClassVar[dict[str, Rule]] = {
        "context_length": whole(1),
        "batch_size": whole(1),
        "weight_decay": number(0),
        "warmup_updates": whole(0) | NOTHING,
        "max_grad_norm": number(above=0),
        "seed": SEED_RULE,
        "verbose": whole(0),
        "weight_averaging": number(0, 1) | NOTHING,
        "validation_share": number(0, 1) | NOTHING,
        "validation_seed": SEED_VALUE,
    }
    """Ranges of stored numbers; the annotations define the types of the other settings."""
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = {
        "learning_rate": (schedule_to_json, schedule_from_json),
        "sampling": (technique_to_json, sampling_from_json),
    }
    """Settings that are not JSON values: name -> conversion to JSON, and back."""
    TYPES: ClassVar[dict[str, tuple[type, ...]]] = {}
    """Classes of the settings that are objects, by name."""
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Settings that determine the parameters of the model, without its core."""

    context_length: int
    learning_rate: float | Schedule
    batch_size: int
    weight_decay: float
    warmup_updates: int | None
    max_grad_norm: float
    verbose: int
    seed: int | None
    weight_averaging: float | None = None
    validation_share: float | None = None
    validation_seed: int = 0
    sampling: Sampling = UNIFORM_STEPS

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers with weights of their own, a lower bound on the number of stored tensors."""

    @abstractmethod
    def inference_memory(self, info: DatasetInfo) -> dict[str, int]:
        """Return upper bounds on the bytes of memory that an agent needs to act, by purpose.

        The weights are not included.
        """

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Pick the fields of the configuration from arguments or attributes by name.

        Raises:
            TypeError: if a setting is not of one of its `TYPES`.
        """
        for name, types in cls.TYPES.items():
            if not isinstance(arguments[name], types):
                names = " or ".join(each.__name__ for each in types)
                raise TypeError(f"{name} must be an object of class {names}, got {arguments[name]!r}")
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def check(self) -> None:
        """Check that sizes are integers of at least 1 and that coefficients are in their range.

        Raises:
            TypeError: if a size is not an integer, or sampling is not a sampling scheme.
            ValueError: if a value is out of range.
        """
        rate = self.learning_rate(1.0) if callable(self.learning_rate) else self.learning_rate
        check_number("learning_rate", rate)
        values = vars(self) | {"learning_rate": rate}
        for name in ("context_length", "batch_size"):
            check_int(name, values[name], most=sys.maxsize)
        for name in ("learning_rate", "weight_decay", "warmup_updates"):
            if values[name] is not None and not 0 <= values[name] < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {values[name]}")
        check_positive("max_grad_norm", self.max_grad_norm)
        check_fraction("weight_averaging", self.weight_averaging)
        check_fraction("validation_share", self.validation_share)
        check_int("validation_seed", self.validation_seed, least=0, most=MAX_SEED)
        if not isinstance(self.sampling, SamplingScheme):
            choices = ", ".join(f"{name}()" for name in SAMPLINGS)
            raise TypeError(f"sampling must be one of {choices}, got {self.sampling!r}")

    def settings_from_data(self, data: Trajectories) -> dict[str, Any]:
        """Return the settings that are None and follow from the training data, with their values."""
        return {}

    def check_changes(self, changes: Mapping[str, Any]) -> None:
        """Check settings that are passed to ``load`` of a file with this configuration.

        Args:
            changes: settings by name; they replace those of the file.

        Raises:
            ValueError: if a setting is None that needs a value without data.
        """
        rules = self.rules()
        for name, rule in rules.items():
            needed = name in self.JSON or not rule.holds(None)
            if needed and name in changes and changes[name] is None:
                raise ValueError(
                    f"{name} must have a value to load a file, got None: leave it out to use that of the file"
                )

    @contextmanager
    def load_error_context(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Add the settings that were passed to errors of loading a checkpoint.

        Args:
            changes: settings passed to ``load``, which replace those of the file.

        Raises:
            CheckpointError: in place of an error that only reports that the weights do not fit.
        """
        own = {name: getattr(self, name) for name in self.MODEL_SETTINGS if name in changes}
        differing = {name: value for name, value in own.items() if value != changes[name]}
        try:
            yield
        except CheckpointError as error:
            if not differing:
                raise
            stored = ", ".join(f"{name}={value!r}" for name, value in differing.items())
            given = ", ".join(f"{name}={changes[name]!r}" for name in differing)
            raise CheckpointError(
                f"the file cannot be loaded with {given}: it was saved with {stored} ({error}); leave these "
                f"arguments out"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON data, without arguments that have their default."""
        stored = vars(self) | {name: to(getattr(self, name)) for name, (to, _) in self.JSON.items()}
        defaults = self.default_json()
        return {
            name: value for name, value in stored.items() if name not in defaults or value != defaults[name]
        }

    @classmethod
    def default_json(cls) -> dict[str, Any]:
        """Return the arguments that files may leave out, with their defaults as JSON data."""
        defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        return {name: cls.JSON[name][0](x) if name in cls.JSON else x for name, x in defaults.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Restore the configuration from the result of `to_json`."""
        values = {**cls.default_json(), **stored}
        return cls(**{**values, **{name: back(values[name]) for name, (_, back) in cls.JSON.items()}})

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Return the validation rule of each stored setting."""
        return setting_rules(cls, [field.name for field in fields(cls)], cls.BOUNDS)

    def hyperparameters(self, algorithm: str, info: DatasetInfo) -> dict[str, Plain]:
        """Return hyperparameters, defaults included, as numbers or short texts for TensorBoard's HParams tab.

        In addition to the configuration: algorithm, datasets and environment.
        """
        values = self._loggable_settings() | {
            "algorithm": algorithm,
            "dataset": ", ".join(info.dataset_ids),
            "env": info.env_id,
            "learning_rate": schedule_to_text(self.learning_rate),
        }
        stated = {name: value for name, value in values.items() if value is not None}
        return {name: value if isinstance(value, Plain) else repr(value) for name, value in stated.items()}

    def _loggable_settings(self) -> dict[str, Any]:
        """Return the settings that `hyperparameters` contain."""
        return {name: value for name, value in vars(self).items() if name != "verbose"}


def check_sizes(**sizes: int | None) -> None:
    """Check that each size is None or an integer of at least 1.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is less than 1.
    """
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, most=sys.maxsize)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless a setting is a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")


MAX_HIDDEN_LAYERS = 100
"""Largest number of hidden layers of a multilayer perceptron."""


def as_hidden_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Return the widths of hidden layers as a tuple.

    Raises:
        TypeError: if they are not a sequence of integers.
        ValueError: if a width is less than 1, or there are more than 100.
    """
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"{name} must be a sequence of widths such as (256, 256), got {sizes!r}")
    if len(sizes) > MAX_HIDDEN_LAYERS:
        raise ValueError(f"{name} must be at most {MAX_HIDDEN_LAYERS} numbers, got {len(sizes)}")
    for size in sizes:
        check_int(name, size, most=sys.maxsize)
    return tuple(sizes)


def check_positive(name: str, value: float | None) -> None:
    """Raise ValueError unless the setting is None, or a finite number of more than 0."""
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{name} must be finite and more than 0, got {value}")


def check_no_policy(dataset: Any) -> None:
    """Raise TypeError if a policy of Stable-Baselines3 is given instead of the dataset."""
    if isinstance(dataset, str) and dataset.endswith("Policy"):
        raise TypeError(
            f"the first argument is a dataset, not a policy, got {dataset!r}: pass a Minari id, e.g. "
            f"'mujoco/hopper/medium-v0', and the network as core=decision_transformer(...)"
        )
