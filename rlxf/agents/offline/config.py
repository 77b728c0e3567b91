"""Settings of offline agents: the arguments of their constructors that files hold."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import partial
from types import NoneType
from typing import Any, ClassVar, Self, get_args

from stable_baselines3.common.type_aliases import Schedule

from rlxf.agents.common.accumulation import check_accumulation_steps
from rlxf.agents.common.arguments import as_python_number
from rlxf.agents.common.checkpoint import SEED_RULE, SEED_VALUE, setting_rules
from rlxf.agents.common.precision import PRECISION_RULE, Precision
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.attention.registry import technique_to_json
from rlxf.data import Trajectories
from rlxf.data.sampling import SAMPLINGS, UNIFORM_STEPS, Sampling, SamplingScheme
from rlxf.training import CheckpointError
from rlxf.training.compat import BUILD_ERRORS
from rlxf.training.json_rules import NOTHING, Rule, number, whole
from rlxf.training.schedules import (
    check_schedule,
    is_custom_schedule,
    schedule_from_json,
    schedule_to_json,
    schedule_to_text,
)
from rlxf.training.strict_json import dump_json
from rlxf.training.tensorboard import HyperparameterValue, to_hyperparameters
from rlxf.utils.checks import MAX_INT64, check_finite_number, check_int
from rlxf.utils.names import instance_from_json

Converter = Callable[[Any], Any]


def technique_converter(kind: str, classes: Mapping[str, type[Any]]) -> tuple[Converter, Converter]:
    """Return the conversion of an object of one of these classes, by name, to JSON, and back."""
    return technique_to_json, partial(instance_from_json, kind, classes)


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
        "weight_averaging": number(above=0, below=1) | NOTHING,
        "validation_fraction": number(above=0, below=1) | NOTHING,
        "validation_seed": SEED_VALUE,
        "gradient_accumulation_steps": whole(1),
        "precision": PRECISION_RULE,
    }
    """Ranges of numbers, in files and in the constructor; annotations define the types of other settings."""
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = {
        "learning_rate": (schedule_to_json, schedule_from_json),
        "sampling": technique_converter("sampling", SAMPLINGS),
    }
    """Settings that are not JSON values: name -> conversion to JSON, and back."""
    TYPES: ClassVar[dict[str, tuple[type, ...]]] = {}
    """Classes of the settings that are objects, by name."""
    DEFAULTS: ClassVar[dict[str, Any]] = {"sampling": UNIFORM_STEPS}
    """Values, by name, of arguments of the constructor that are None."""
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Settings that determine the parameters of the model, without its core."""

    NOT_STORED: ClassVar[tuple[str, ...]] = ("cuda_graphs",)
    """Settings that files do not hold."""

    context_length: int
    learning_rate: float | Schedule
    batch_size: int
    weight_decay: float
    warmup_updates: int | None
    max_grad_norm: float
    verbose: int
    seed: int | None
    weight_averaging: float | None = None
    validation_fraction: float | None = None
    validation_seed: int = 0
    sampling: Sampling = UNIFORM_STEPS
    gradient_accumulation_steps: int = 1
    precision: Precision = "float32"
    cuda_graphs: bool = True

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

        `DEFAULTS` replace None. NumPy scalars become built-in numbers, and integral floats such as 1e3 become
        ints where the annotation is an int.

        Raises:
            TypeError: if a setting is not of one of its `TYPES`.
        """
        values = {field.name: arguments[field.name] for field in fields(cls)}
        values |= {name: default for name, default in cls.DEFAULTS.items() if values[name] is None}
        for name, types in cls.TYPES.items():
            if not isinstance(values[name], types):
                names = " or ".join(each.__name__ for each in types)
                raise TypeError(f"{name} must be an object of class {names}, got {values[name]!r}")
        whole = {field.name for field in fields(cls) if int in (field.type, *get_args(field.type))}
        return cls(**{name: as_python_number(x, name in whole) for name, x in values.items()})

    def check(self) -> None:
        """Check the types and the ranges of all settings.

        Raises:
            TypeError: if a setting has another type than its annotation.
            ValueError: if a value is out of range, or a schedule of rlxf or SB3 ends with such a value.
        """
        check_schedule("learning_rate", self.learning_rate)
        if not is_custom_schedule(self.learning_rate):
            check_schedule("learning_rate", self.learning_rate, progress=0.0)
        if not isinstance(self.sampling, SamplingScheme):
            choices = ", ".join(f"{name}()" for name in SAMPLINGS)
            raise TypeError(f"sampling must be one of {choices}, got {self.sampling!r}")
        for name, (to_json, _) in self.JSON.items():
            if to_json is technique_to_json:
                check_storable(name, getattr(self, name))
        self._check_values()
        check_accumulation_steps(self.gradient_accumulation_steps, self.batch_size, "number of windows")

    def _check_values(self) -> None:
        """Raise an error unless the rules allow all settings; those that follow from the data may be None."""
        rules, values = self.rules(), self._json_values()
        for field in fields(self):
            rule, value = rules[field.name], values[field.name]
            if NoneType in get_args(field.type) and not rule.holds(None):
                rule = rule | NOTHING
            rule.check_argument(field.name, value)
            if type(value) in (int, float):
                check_finite_number(field.name, value)

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
        of_file = {name: getattr(self, name) for name in self.MODEL_SETTINGS if name in changes}
        differing = {name: value for name, value in of_file.items() if value != changes[name]}
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
        values, defaults = self._json_values(), self.default_json()
        return {
            name: value
            for name, value in values.items()
            if name not in self.NOT_STORED and (name not in defaults or value != defaults[name])
        }

    def _json_values(self) -> dict[str, Any]:
        """Return all arguments as JSON data."""
        return vars(self) | {name: to(getattr(self, name)) for name, (to, _) in self.JSON.items()}

    @classmethod
    def default_json(cls) -> dict[str, Any]:
        """Return the arguments that files may leave out, with their defaults as JSON data."""
        defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        return {name: cls.JSON[name][0](x) if name in cls.JSON else x for name, x in defaults.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Self:
        """Restore the configuration from the result of `to_json`.

        Args:
            stored: the result.
            changes: settings passed to ``load``. They are used here for values that cannot be restored, such
                as objects of the user's own classes, which a file does not import. None for no settings.
        """
        values = {**cls.default_json(), **stored}
        return cls(**values | {name: cls._from_json(name, values[name], changes or {}) for name in cls.JSON})

    @classmethod
    def _from_json(cls, name: str, value: Any, changes: Mapping[str, Any]) -> Any:
        """Restore a setting in `JSON`; if this is impossible, return the value in ``changes``."""
        try:
            return cls.JSON[name][1](value)
        except BUILD_ERRORS:
            if name not in changes:
                raise
            return changes[name]

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Return the validation rule of each stored setting."""
        return setting_rules(cls, [field.name for field in fields(cls)], cls.BOUNDS)

    def hyperparameters(self, algorithm: str, info: DatasetInfo) -> dict[str, HyperparameterValue]:
        """Return hyperparameters, defaults included, as numbers or short texts for TensorBoard's HParams tab.

        In addition to the configuration: algorithm, datasets and environment.
        """
        values = {
            **self._loggable_settings(),
            "algorithm": algorithm,
            "dataset": ", ".join(info.dataset_ids),
            "env": info.env_id,
            "learning_rate": schedule_to_text(self.learning_rate),
        }
        return to_hyperparameters(values)

    def _loggable_settings(self) -> dict[str, Any]:
        """Return the settings that `hyperparameters` contain."""
        return {name: value for name, value in vars(self).items() if name != "verbose"}


def check_storable(name: str, value: Any) -> None:
    """Check that files can hold an objective, a sampling or a conditioning, also one of the user's own class.

    Raises:
        TypeError: if its class is no frozen dataclass, or one of its fields is no JSON value.
    """
    parameters = vars(type(value)).get("__dataclass_params__")  # not that of a base class
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"{name} must be an object of a frozen dataclass, whose fields files hold, got {value!r}: write "
            f"@dataclass(frozen=True) before the class {type(value).__name__}"
        )
    try:
        dump_json(technique_to_json(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must have fields that are numbers, texts or lists of these, which files hold, got "
            f"{value!r} ({error})"
        ) from error


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
        check_int(name, size, most=MAX_INT64)
    return tuple(map(int, sizes))


def check_no_policy(dataset: Any) -> None:
    """Raise TypeError if a policy of Stable-Baselines3 is given instead of the dataset."""
    if isinstance(dataset, str) and dataset.endswith("Policy"):
        raise TypeError(
            f"the first argument is a dataset, not a policy, got {dataset!r}: pass a Minari id, e.g. "
            f"'mujoco/hopper/medium-v0', and the sizes of the network by the other arguments"
        )
