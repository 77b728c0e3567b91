"""Options that the commands share which train an agent on Minari datasets."""

from dataclasses import asdict
from typing import Annotated, Any

from tyro.conf import arg

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.cli.choices import parse_choice
from rlxf.cli.options import Json, PrecisionOption, argument_defaults, options
from rlxf.data import SAMPLINGS, UniformSteps

Datasets = Annotated[
    tuple[str, ...],
    arg(help='One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine.'),
]
Updates = Annotated[int, arg(help="Number of weight updates, each on one batch.")]
Download = Annotated[bool, arg(help="Download datasets that are not on this machine.")]
TrustData = Annotated[
    bool,
    arg(
        help="Trust the authors of the data. Their full description of the environment (entry point, "
        "arguments, wrappers) is used, which can run code. Without this flag, the registered environment is "
        "used."
    ),
]
EvaluationEnv = Annotated[
    str | None,
    arg(
        help="Gymnasium id of the environment for evaluations. None means that of the data. With module:id, "
        "the module is imported first."
    ),
]
EvaluationEnvArguments = Annotated[
    Json,
    arg(
        help="Arguments of the environment as a JSON object. In the environment of the data, they override "
        "its arguments."
    ),
]
EvaluateEvery = Annotated[
    int | None,
    arg(
        help="Number of updates between two evaluations during training. None means a tenth of the training, "
        "or longer if evaluations would take more than about a tenth of the training time; the last "
        "evaluation is always made, at the end. 0 means no evaluation during training."
    ),
]
Videos = Annotated[
    bool,
    arg(
        help="Record a video of an episode as often as evaluations are made, if the environment renders "
        "images. By default videos are left out if they would take more than about 5% of the training time, "
        "at 10 ms for a recorded step. With --evaluate-every, none is left out."
    ),
]
DEFAULTS = argument_defaults(DecisionTransformer)
"""Argument -> default; all agents that are trained on datasets have the same for `OfflineTrainingOptions`."""


@options
class OfflineTrainingOptions:
    """Options of all agents that are trained on datasets.

    They are averaged weights, held-out episodes, sampling, memory, precision and GPUs.
    """

    weight_averaging: float | None = DEFAULTS["weight_averaging"]
    """Decay of an exponential moving average of the weights, e.g. 0.999. The average is evaluated, and saved
    as the policy. None means no average."""
    validation_fraction: float | None = DEFAULTS["validation_fraction"]
    """Fraction of the episodes that are held out, e.g. 0.1. The loss on them is logged during training, and
    the checkpoint with the lowest one is best-validation.zip. None means that all episodes are used."""
    validation_seed: int = DEFAULTS["validation_seed"]
    """Seed of the choice of held-out episodes. It does not depend on --seed."""
    sampling: str = UniformSteps.__name__
    """Probabilities with which windows are drawn: UniformSteps, UniformEpisodes, ReturnWeighted or
    HighReturns, or a JSON object with options, e.g. '{"name": "ReturnWeighted", "temperature": 0.2}'."""
    gradient_accumulation_steps: int = DEFAULTS["gradient_accumulation_steps"]
    """Number of micro-batches into which each batch is divided to save memory. The update stays the same
    apart from rounding, without dropout and sampled entropies."""
    precision: PrecisionOption = DEFAULTS["precision"]
    cuda_graphs: bool = DEFAULTS["cuda_graphs"]
    """Capture losses and gradients of updates as CUDA graphs on a GPU."""

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the agent.

        Raises:
            ValueError, TypeError: if sampling is unknown or invalid.
        """
        return asdict(self) | {"sampling": parse_choice("sampling", self.sampling, SAMPLINGS)}
