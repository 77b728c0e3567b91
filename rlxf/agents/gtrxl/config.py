"""Hyperparameters of GTrXLPPO with their defaults and checks, and the sizes of rollouts and minibatches."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from gymnasium import Env
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.accumulation import check_accumulation_steps
from rlxf.agents.common.arguments import as_python_number
from rlxf.agents.common.checkpoint import SEED_RULE
from rlxf.agents.common.precision import PRECISION_RULE, Precision
from rlxf.training.distributed import process_group
from rlxf.training.json_rules import MAPPING, NOTHING, Rule, number, whole
from rlxf.training.schedules import check_schedule
from rlxf.utils.checks import check_bool

SCHEDULES = ("learning_rate", "clip_range", "clip_range_vf", "ent_coef")
"""Hyperparameters that may be schedules."""
SB3_ARGUMENTS = (
    *("learning_rate", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "use_sde"),
    *("sde_sample_freq", "stats_window_size", "verbose", "seed"),
)
"""Hyperparameters that are also arguments of SB3's ``OnPolicyAlgorithm``, without the steps of a rollout."""
SIZES = ("n_steps", "batch_size", "segment_length", "n_epochs", "n_envs", "stats_window_size")
NUMBERS: dict[str, Rule] = {
    **dict.fromkeys(SIZES, whole(1)),
    **dict.fromkeys(("gamma", "gae_lambda"), number(0, 1)),
    "critic_lambda": number(0, 1) | NOTHING,
    **dict.fromkeys(("vf_coef", "reconstruction_coef"), number(0)),
    **dict.fromkeys(("max_grad_norm", "advantage_epsilon"), number(above=0)),
    "sde_sample_freq": whole(1) | Rule("-1 for once in each rollout", lambda value: value == -1),
    "target_kl": number(above=0) | NOTHING,
    "seed": SEED_RULE,
    "verbose": whole(0),
}
"""Rules of the arguments that are numbers, in the constructor and in a file."""
BOUNDS = NUMBERS | {
    "n_steps": NUMBERS["n_steps"] | NOTHING,
    "gradient_accumulation_steps": whole(1),
    "policy_kwargs": MAPPING,
    "precision": PRECISION_RULE,
}
"""Rules of the settings in a file; the annotations of the constructor define the other settings."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyperparameters of `GTrXLPPO`, which describes them, with their defaults.

    NumPy scalars, and floats with an integral value where an integer is required, are converted to built-in
    numbers.

    Raises:
        ValueError: if a number is out of range or not finite, rollouts or minibatches do not consist of whole
            segments, or there are more micro-batches than segments in a minibatch.
        TypeError: if an argument has another type, or a schedule is neither a number nor a function that
            returns one.
    """

    learning_rate: float | Schedule = LinearSchedule(1e-3, 0.0, 1.0)  # noqa: RUF009  # it is immutable
    n_steps: int | None = None
    batch_size: int | None = None
    n_epochs: int = 6
    gamma: float = 0.99
    gae_lambda: float = 0.9
    clip_range: float | Schedule = 0.2
    clip_range_vf: float | Schedule | None = None
    normalize_advantage: bool = True
    ent_coef: float | Schedule = LinearSchedule(0.03, 0.0, 1.0)  # noqa: RUF009
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    segment_length: int = 64
    critic_lambda: float | None = None
    target_kl: float | None = None
    advantage_epsilon: float = 0.05
    use_sde: bool = False
    sde_sample_freq: int = -1
    previous_action: bool = True
    persist_memory_across_episodes: bool = False
    recompute_memory: bool = False
    reconstruction_coef: float = 0.0
    gradient_accumulation_steps: int = 1
    precision: Precision = "float32"
    compile: bool = False
    cuda_graphs: bool = True
    n_envs: int = 32
    stats_window_size: int = 100
    verbose: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = as_python_number(getattr(self, field.name), int in (field.type, *get_args(field.type)))
            object.__setattr__(self, field.name, value)
            if field.type is bool:
                check_bool(field.name, value)
            if field.name in NUMBERS and not (value is None and field.default is None):
                NUMBERS[field.name].check_argument(field.name, value)
        self._check_multiples()
        segments = self.minibatch_size // self.segment_length
        check_accumulation_steps(self.gradient_accumulation_steps, segments, "number of segments")
        check_schedules(self)
        if self.clip_range_vf == 0:
            raise ValueError("clip_range_vf must be more than 0, or None for no clipping, got 0")
        if self.sde_sample_freq != -1 and not self.use_sde:
            raise ValueError(f"sde_sample_freq={self.sde_sample_freq} requires use_sde=True")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "PPOConfig":
        """Take the configuration from the arguments of a function; further arguments are ignored."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def sb3_arguments(self) -> dict[str, Any]:
        """Values of `SB3_ARGUMENTS`."""
        return {name: getattr(self, name) for name in SB3_ARGUMENTS}

    @property
    def minibatch_size(self) -> int:
        """Steps of a minibatch over all environments and processes.

        They are ``batch_size``, or by default the fewest whole segments with at least `BATCH_STEPS` steps.
        """
        if self.batch_size is not None:
            return self.batch_size
        return -(-BATCH_STEPS // self.segment_length) * self.segment_length

    def steps_per_env(self, env: Env | VecEnv | None) -> int:
        """Return the steps of each environment in a rollout.

        They are ``n_steps``, or by default the fewest whole segments with at least `ROLLOUT_STEPS` steps over
        all environments.

        Args:
            env: the training environments of this process; None if they are not known yet.
        """
        if self.n_steps is not None:
            return self.n_steps
        per_process = env.num_envs if isinstance(env, VecEnv) else 1
        n_envs = self.n_envs if env is None else per_process * process_group().world_size
        return default_n_steps(n_envs, self.segment_length)

    def _check_multiples(self) -> None:
        for name in ("n_steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and (value < self.segment_length or value % self.segment_length):
                raise ValueError(
                    f"{name} must be a multiple of segment_length={self.segment_length}, got {value}"
                )


ROLLOUT_STEPS = 2048
"""Minimum steps of a rollout over all environments of all processes if ``n_steps`` is None."""
BATCH_STEPS = 256
"""Minimum steps of a minibatch if ``batch_size`` is None."""


def default_n_steps(n_envs: int, segment_length: int) -> int:
    """Return the steps of each environment in a rollout if ``n_steps`` is None.

    Args:
        n_envs: number of environments of all processes.
        segment_length: steps of a segment.
    """
    segments = -(-ROLLOUT_STEPS // max(1, n_envs * segment_length))
    return max(1, segments) * segment_length


def check_schedules(settings: Any, progress: float = 1.0) -> None:
    """Raise unless the numbers, or the values of the schedules, are finite and at least 0.

    Args:
        settings: object with the attributes `SCHEDULES`; only clip_range_vf may be None.
        progress: progress remaining at which a function is evaluated: 1 at the start, 0 at the end.

    Raises:
        ValueError: if a number is negative or not finite.
        TypeError: if a value is not a number.
    """
    for name in SCHEDULES:
        value = getattr(settings, name)
        if value is None and name == "clip_range_vf":
            continue
        check_schedule(name, value, progress)
