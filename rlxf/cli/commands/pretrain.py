"""``rlxf pretrain``: masked pre-training on datasets, saved as a run."""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import TransformerSpec
from rlxf.cli.options.common import CheckpointSeconds, Count, LogInterval, Quiet, check_counts, options
from rlxf.cli.options.offline_options import WindowOptions
from rlxf.cli.run_loading import PRETRAINING
from rlxf.cli.training_command import TrainingCommand
from rlxf.cli.training_session import Start
from rlxf.data import load_trajectories
from rlxf.training.checkpoints import EVERY_SECONDS


@options
class Pretrain(TrainingCommand):
    """Pretrain weights by masked token prediction on trajectories, and save them in a new folder.

    Agents start from its weights with --pretrained FOLDER in "rlxf train dt" and "rlxf train gtrxl". Choose
    the same core options as for the agent. The folder contains config.json, checkpoint.zip, progress.csv and
    TensorBoard events. Ctrl-C, SIGTERM and SIGUSR1 stop the training and save its progress. "rlxf resume"
    continues it, also after a crash.

    Example: rlxf pretrain --dataset rlxf/cartpole/mixed-v0 --updates 200 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """One or more Minari ids, which are concatenated. "rlxf datasets" lists those on this machine."""
    updates: Count = 100_000
    """Number of weight updates, each on one batch."""
    mask_probability: float = 0.15
    """Probability with which a token is selected for prediction."""
    download: bool = False
    """Download datasets that are not on this machine."""
    seed: Count = 0
    """Seed of weights, windows, masks and dropout. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means runs/pretraining-DATASET-SEED. It must not exist."""
    log_interval: LogInterval = 100
    checkpoint_seconds: CheckpointSeconds = EVERY_SECONDS
    progress_bar: bool = True
    """Show updates and loss every few seconds, and progress bars."""
    quiet: Quiet = False
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. Pre-training uses it bidirectionally and without memory."""

    agent_name = PRETRAINING

    @property
    def total(self) -> int:
        """Number of updates of the training."""
        return self.updates

    @property
    def default_name(self) -> str:
        """Name of the run folder without the seed."""
        return f"pretraining-{'+'.join(self.dataset)}"

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and FileExistsError if the run folder exists."""
        check_counts(self, "updates", "log_interval")
        super().check()

    def build(self) -> MaskedPretraining:
        """Load the datasets, and return the pretraining."""
        return MaskedPretraining(
            load_trajectories(self.dataset, download=self.download, progress_bar=self.verbose),
            mask_probability=self.mask_probability,
            core=self.core,
            seed=self.seed,
            **self.learner.arguments(),
        )

    def build_at(self, start: Start) -> MaskedPretraining:
        """Return the pretraining to continue. After the last update it does not need the datasets."""
        if start.file is not None and start.steps >= self.updates:
            return MaskedPretraining.load(start.file, device=self.learner.device)
        return self.build()

    def resolved_options(self, agent: MaskedPretraining) -> dict[str, Any]:
        """Return the options whose default depends on the data, with their values."""
        return {name: getattr(agent, name) for name in ("return_scale", "episode_length")}
