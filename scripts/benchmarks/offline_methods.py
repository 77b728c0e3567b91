"""Offline methods that benchmarks compare: names, requirements, presets of their sizes, construction."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gymnasium import spaces

from benchmarks.offline_setting import Setting
from rlxf import BehaviorCloning, DecisionTransformer, ReturnConditionedMLP
from rlxf.agents.decision_transformer.conditioning import (
    ElasticHistory,
    HighestValueReturn,
    MaxReturn,
    SampledReturn,
)
from rlxf.agents.mlp.behavior_cloning import check_fraction
from rlxf.agents.mlp.return_conditioned import check_returns_differ
from rlxf.agents.offline.objectives import QRegularized
from rlxf.agents.offline.trajectory_model import default_return_scale
from rlxf.data import HighReturns, ReturnWeighted, Trajectories, load_trajectories


@dataclass(frozen=True)
class Preset:
    """Sizes of the agents of all methods; one preset is used for all datasets.

    Args:
        updates: number of updates of each agent.
        transformer: sizes and learning rates of the transformers. Returns are divided by their standard
            deviation in the data instead of its ``return_scale``.
        conditioned_width: width of both hidden layers of the return-conditioned perceptron.
        weight_averaging: decay of the moving average of the weights of all agents of this package; None for
            none.
        validation_fraction: fraction of the episodes that all agents of this package hold out; None for none.
        state_loss_weight: weight of the auxiliary loss of the transformers of this package.
    """

    updates: int
    transformer: Setting
    conditioned_width: int
    weight_averaging: float | None = None
    validation_fraction: float | None = None
    state_loss_weight: float = 0.0

    @property
    def training(self) -> dict[str, Any]:
        """Arguments of all agents of this package."""
        return {
            "weight_averaging": self.weight_averaging,
            "validation_fraction": self.validation_fraction,
            "device": "cpu",
        }

    def describe(self, *sizes: str) -> str:
        """Return the updates, these sizes and the options of all agents of this package in words."""
        options = {"weight averaging": self.weight_averaging, "validation fraction": self.validation_fraction}
        given = [f"{name} {value:g}" for name, value in options.items() if value is not None]
        return ", ".join([f"{self.updates} updates", *sizes, *given])


PRESETS = {
    "default": Preset(10_000, Setting(64, 2, learning_rate=1e-3, decay=0.1), 1024),
    "reduced": Preset(
        7_500, Setting(64, 2, context_length=10, batch_size=32, learning_rate=1e-3, decay=0.1), 256
    ),
}
"""Presets by name; "reduced" costs about a quarter of "default"."""


@dataclass(frozen=True)
class Method:
    """Offline method.

    Args:
        title: name in tables.
        train: function of the data, the sizes and the seed that builds an agent; None for HF's model.
        check: function that raises ValueError if the data do not allow the method.
        sizes: function that describes the sizes of a preset that the method uses.
        deterministic: False to evaluate the stochastic policy, as the source of the method does.
    """

    title: str
    train: Callable[[Trajectories, Preset, int], Any] | None
    check: Callable[[Trajectories], None]
    sizes: Callable[[Preset], str]
    deterministic: bool = True


def cloning(data: Trajectories, preset: Preset, seed: int, **options: Any) -> BehaviorCloning:
    """Build behavior cloning with default sizes."""
    return BehaviorCloning(data, seed=seed, **preset.training, **options)


def conditioned_cloning(data: Trajectories, preset: Preset, seed: int) -> ReturnConditionedMLP:
    """Build the return-conditioned perceptron."""
    sizes = (preset.conditioned_width, preset.conditioned_width)
    return ReturnConditionedMLP(data, hidden_sizes=sizes, seed=seed, **preset.training)


def transformer(data: Trajectories, preset: Preset, seed: int, **techniques: Any) -> DecisionTransformer:
    """Build a Decision Transformer with an objective and a conditioning."""
    arguments = scaled(preset.transformer, data).arguments() | preset.training | techniques
    return DecisionTransformer(data, seed=seed, state_loss_weight=preset.state_loss_weight, **arguments)


def scaled(setting: Setting, data: Trajectories) -> Setting:
    """Return a setting whose scale of returns is that of the data."""
    return replace(setting, return_scale=default_return_scale(data))


def no_requirement(data: Trajectories) -> None:
    """Accept all data."""


def check_different_returns(data: Trajectories) -> None:
    """Raise ValueError if all episodes have the same return."""
    check_returns_differ(data.returns)


def check_vectors(data: Trajectories) -> None:
    """Raise ValueError unless observations are vectors and actions continuous, which HF's model needs."""
    if data.observation_mean is None or not isinstance(data.action_space, spaces.Box):
        raise ValueError(
            f"HF's model needs vectors as observations and Box actions, got {data.observation_space} and "
            f"{data.action_space}"
        )


def conditioned_sizes(preset: Preset) -> str:
    """Describe the sizes of the return-conditioned perceptron."""
    return preset.describe(f"width {preset.conditioned_width}")


def transformer_sizes(preset: Preset) -> str:
    """Describe the sizes of a transformer, and its dropout and auxiliary loss if they are not the default."""
    sizes, weight = preset.transformer, preset.state_loss_weight
    return preset.describe(
        f"width {sizes.width}",
        f"{sizes.layers} layers",
        f"context {sizes.context_length}",
        f"batch {sizes.batch_size}",
        *([] if sizes.dropout == Setting.dropout else [f"dropout {sizes.dropout:g}"]),
        *([f"state loss {weight:g}"] if weight else []),
    )


def other_sizes(preset: Preset) -> str:
    """Describe the sizes of HF's model, which does not have the options of the agents of this package."""
    return transformer_sizes(Preset(preset.updates, preset.transformer, preset.conditioned_width))


def decision_transformer(title: str, **techniques: Any) -> Method:
    """Return the method of a Decision Transformer with an objective and a conditioning."""
    check = check_different_returns if "conditioning" in techniques else no_requirement
    return Method(title, partial(transformer, **techniques), check, transformer_sizes)


WEIGHTED = ReturnWeighted(0.1)
"""Sampling of the return-weighted methods: the best episode is drawn exp(10) times as often as the worst."""
HIGH = HighReturns(0.25)
"""Sampling of episodes with returns in the upper quarter of their range."""
METHODS = {
    "bc": Method("BC", cloning, no_requirement, Preset.describe),
    "bc-best": Method(
        "BC of the best 10%", partial(cloning, best=0.1), partial(check_fraction, best=0.1), Preset.describe
    ),
    "bc-weighted": Method(
        "BC, return-weighted", partial(cloning, sampling=WEIGHTED), no_requirement, Preset.describe
    ),
    "bc-high": Method(
        "BC, high returns", partial(cloning, sampling=HIGH), check_different_returns, Preset.describe
    ),
    "rvs": Method("RvS, highest target", conditioned_cloning, check_different_returns, conditioned_sizes),
    "dt": decision_transformer("DT, highest target"),
    "dt-weighted": decision_transformer("DT, return-weighted, highest target", sampling=WEIGHTED),
    "dt-q": decision_transformer("DT, QRegularized, highest target", objective=QRegularized()),
    "dt-max": decision_transformer("DT, MaxReturn", conditioning=MaxReturn()),
    "dt-elastic": decision_transformer("DT, ElasticHistory", conditioning=ElasticHistory()),
    "dt-sampled": replace(
        decision_transformer("DT, SampledReturn", conditioning=SampledReturn()), deterministic=False
    ),
    "dt-q-max": decision_transformer(
        "DT, QRegularized, MaxReturn", objective=QRegularized(), conditioning=MaxReturn()
    ),
    "dt-q-value": decision_transformer(
        "DT, QRegularized, HighestValueReturn", objective=QRegularized(), conditioning=HighestValueReturn()
    ),
    "hf": Method("HF DT, highest target", None, check_vectors, other_sizes),
}
"""Methods by name. The highest target is the highest return of the data."""


def excluded(dataset: str, method: str) -> str | None:
    """Return why the data do not allow a method; None if they do."""
    try:
        METHODS[method].check(load_trajectories(dataset))
    except ValueError as error:
        return str(error)
    return None
