"""``rlxf pretrain``: masked pre-training on datasets, saved as a run."""

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from tyro.conf import arg

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import TransformerSpec
from rlxf.cli.argument_checks import Count, check_counts, check_from_zero
from rlxf.cli.finalize_run import error_context
from rlxf.cli.options.offline_options import WindowOptions
from rlxf.cli.output import as_table, print_out
from rlxf.cli.progress import OFFLINE, progress
from rlxf.cli.run_loading import PRETRAINING
from rlxf.cli.torchrun_job import init_distributed
from rlxf.cli.training_session import (
    Start,
    config_errors,
    describe_completion,
    is_complete,
    learn_resumably,
    options_of,
    train_to_completion,
)
from rlxf.data import load_trajectories
from rlxf.training import RunFolder
from rlxf.training.checkpoints import EVERY_SECONDS, StopRequest

COMMAND_OPTIONS = ("dataset", "updates", "mask_probability", "seed", "log_interval", "checkpoint_seconds")
"""Options of the command itself in ``config.json``, which are needed to resume a run."""


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Pre-train a transformer by masked token prediction on trajectories, and save it in a new folder.

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
    seed: int = 0
    """Seed of weights, windows, masks and dropout. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means runs/pretraining-DATASET-SEED. It must not exist."""
    log_interval: Count = 100
    """Number of updates between two log entries."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds between two checkpoints for "rlxf resume". The last three are kept."""
    progress_bar: bool = True
    """Show updates and loss every few seconds, and progress bars."""
    quiet: bool = False
    """Print only warnings, errors and the final result, without settings and progress."""
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """Transformer of the agent. Pre-training uses it bidirectionally and without memory."""

    def prepare(self) -> Callable[[], None]:
        """Load the datasets, build the pretraining, create the run, and return the training to run."""
        init_distributed()
        check_counts(self, "updates", "log_interval")
        check_from_zero(self, "checkpoint_seconds", "seed")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")
        pretraining = self._build()
        run = RunFolder.create(self._path, self._config(pretraining))
        with error_context(run):
            pretraining.set_logger(run.make_logger())
        return partial(self._train, pretraining, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """Return the options that a run was started with.

        ``trust`` has no effect, because pre-training has no environment.

        Raises:
            ValueError: if an option is missing in its ``config.json``.
        """
        with config_errors(run):
            own = {name: run.config[name] for name in COMMAND_OPTIONS} | {
                "dataset": tuple(run.config["dataset"])
            }
            learner = options_of(WindowOptions, run.config)
            core = TransformerSpec.from_dict(run.config["core"])
        return cls(**own, run=run.path, progress_bar=progress_bar, quiet=quiet, learner=learner, core=core)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """Like `prepare`, to resume an interrupted run.

        Raises:
            FileNotFoundError: if it has checkpoints, and none of them is intact.
        """
        init_distributed()
        if is_complete(run, self.updates):
            return partial(print_out, describe_completion(run, "updates"))
        start = Start.of(run)
        pretraining = self._pretraining_at(start)
        pretraining.set_logger(run.continue_logger(start.log, start.steps))
        return partial(self._train, pretraining, run, start)

    def _pretraining_at(self, start: Start) -> MaskedPretraining:
        """Load the pretraining to continue. After the last update it does not need the datasets."""
        if start.file is not None and start.steps >= self.updates:
            return MaskedPretraining.load(start.file, device=self.learner.device)
        return self._build()

    def _build(self) -> MaskedPretraining:
        return MaskedPretraining(
            load_trajectories(self.dataset, download=self.download, progress_bar=self._verbose),
            mask_probability=self.mask_probability,
            core=self.core,
            seed=self.seed,
            **self.learner.arguments(),
        )

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"pretraining-{name}-{self.seed}") if self.run is None else self.run

    def _config(self, pretraining: MaskedPretraining) -> dict[str, Any]:
        """Return the options of the run, including defaults."""
        own = {name: getattr(self, name) for name in COMMAND_OPTIONS} | {"dataset": list(self.dataset)}
        from_data = {name: getattr(pretraining, name) for name in ("return_scale", "episode_length")}
        learner = asdict(self.learner) | from_data
        core = {"core": pretraining.core.to_dict()}
        return {"agent": PRETRAINING} | own | learner | core

    def _train(self, pretraining: MaskedPretraining, run: RunFolder, start: Start) -> None:
        learn = partial(self._learn, pretraining, run, start)
        with error_context(run), closing(pretraining.logger):
            if not self.quiet:
                print_out(as_table(str(run.path), run.config))
            train_to_completion(pretraining, run, start, self.updates, learn, finish=lambda: None)

    def _learn(self, pretraining: MaskedPretraining, run: RunFolder, start: Start, stop: StopRequest) -> None:
        learn = partial(pretraining.learn, self.updates, log_interval=self.log_interval)
        with progress(self._verbose, "updates", self.updates, OFFLINE) as callbacks:
            learn_resumably(pretraining, run, learn, callbacks, {}, self.checkpoint_seconds, start, stop)

    @property
    def _verbose(self) -> bool:
        """Return whether progress is shown."""
        return self.progress_bar and not self.quiet
