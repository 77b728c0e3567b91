"""Training arguments of offline agents as one value, their checks, and the HParams tab."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from stable_baselines3.common.type_aliases import Schedule

from rlxf.agents.common.checkpoint import SEED, setting_rules
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.attention import TransformerSpec
from rlxf.training import schedule_from_json, schedule_to_json, schedule_to_text
from rlxf.training.compat import NOTHING, Rule, number, whole

NO_HYPERPARAMETERS = ("verbose", "core")
Plain = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Arguments of the constructor of an offline agent that its checkpoints hold.

    The meaning of each argument is that of `rlxf.DecisionTransformer`. ``return_scale`` and
    ``episode_length`` are None until the dataset is known.
    """

    BOUNDS: ClassVar[dict[str, Rule]] = {
        "context_length": whole(1),
        "batch_size": whole(1),
        "weight_decay": number(0),
        "warmup_updates": whole(0) | NOTHING,
        "max_grad_norm": number(above=0),
        "return_scale": number(above=0),
        "episode_length": whole(1),
        "seed": SEED,
        "verbose": whole(0),
    }
    """Ranges of stored numbers; the annotations define the types of the other settings."""

    context_length: int
    learning_rate: float | Schedule
    batch_size: int
    weight_decay: float
    warmup_updates: int | None
    max_grad_norm: float
    return_scale: float | None
    episode_length: int | None
    core: TransformerSpec
    verbose: int
    seed: int | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Pick the fields of the configuration from arguments or attributes by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def check(self) -> None:
        """Check that sizes are integers of at least 1 and that coefficients are in their range.

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if a value is out of range.
        """
        check_sizes(
            context_length=self.context_length, batch_size=self.batch_size, episode_length=self.episode_length
        )
        rate = self.learning_rate(1.0) if callable(self.learning_rate) else self.learning_rate
        nonnegative = {
            "learning_rate": rate,
            "weight_decay": self.weight_decay,
            "warmup_updates": self.warmup_updates,
        }
        for name, value in nonnegative.items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        for name, value in {"max_grad_norm": self.max_grad_norm, "return_scale": self.return_scale}.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be finite and more than 0, got {value}")

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON data."""
        rate = schedule_to_json(self.learning_rate)
        return vars(self) | {"core": self.core.to_dict(), "learning_rate": rate}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Restore the configuration from the result of `to_json`."""
        core, rate = TransformerSpec.from_dict(stored["core"]), schedule_from_json(stored["learning_rate"])
        return cls(**{**stored, "core": core, "learning_rate": rate})

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Return the validation rule of each stored setting."""
        return setting_rules(cls, [field.name for field in fields(cls)], cls.BOUNDS)


def check_sizes(**sizes: int | None) -> None:
    """Check that each size is None or an integer of at least 1.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is less than 1.
    """
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_no_policy(dataset: Any) -> None:
    """Raise TypeError if a policy of Stable-Baselines3 is given instead of the dataset."""
    if isinstance(dataset, str) and dataset.endswith("Policy"):
        raise TypeError(
            f"the first argument is a dataset, not a policy, got {dataset!r}: pass a Minari id, e.g. "
            f"'mujoco/hopper/medium-v0', and the network as core=decision_transformer(...)"
        )


def hyperparameters(algorithm: str, config: OfflineConfig, info: DatasetInfo) -> dict[str, Plain]:
    """Return hyperparameters, defaults included, as numbers or short texts for TensorBoard's HParams tab.

    In addition to the configuration: algorithm, datasets, environment and the fields of the core.
    """
    core = config.core
    values = {name: value for name, value in vars(config).items() if name not in NO_HYPERPARAMETERS}
    values |= {field.name: getattr(core, field.name) for field in fields(core)}
    values |= {
        "algorithm": algorithm,
        "dataset": ", ".join(info.dataset_ids),
        "env": info.env_id,
        "learning_rate": schedule_to_text(config.learning_rate),
        "feed_forward": core.inner_width,
    }
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Plain:
    return value if isinstance(value, Plain) else repr(value)
