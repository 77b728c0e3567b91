"""Options of training on datasets: averaged weights, held-out episodes, sampling, memory, precision, GPUs."""

from typing import Any

from rlxf.cli.choices import parse_choice
from rlxf.cli.options import PrecisionOption, options
from rlxf.data import SAMPLINGS, UniformSteps


@options
class RobustOptions:
    """Options of all agents that are trained on datasets."""

    weight_averaging: float | None = None
    """Decay of an exponential moving average of the weights, e.g. 0.999. The average is evaluated, and saved
    as the policy. None means no average."""
    validation_share: float | None = None
    """Share of the episodes that are held out, e.g. 0.1. The loss on them is logged during training, and the
    checkpoint with the lowest one is best-validation.zip. None means that all episodes are used."""
    validation_seed: int = 0
    """Seed of the choice of held-out episodes. It does not depend on --seed."""
    sampling: str = UniformSteps.__name__
    """Probabilities with which windows are drawn: UniformSteps, UniformEpisodes, ReturnWeighted or
    HighReturns, or a JSON object with options, e.g. '{"name": "ReturnWeighted", "temperature": 0.2}'."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches into which each batch is divided to save memory. The update stays the same
    apart from rounding, without dropout and sampled entropies."""
    precision: PrecisionOption = "float32"
    cuda_graphs: bool = True
    """Capture losses and gradients of updates as CUDA graphs on a GPU."""

    def robust_arguments(self) -> dict[str, Any]:
        """Return those of these options that differ from the arguments of the agent.

        Raises:
            ValueError, TypeError: if sampling is unknown or invalid.
        """
        return {"sampling": parse_choice("sampling", self.sampling, SAMPLINGS)}
