"""``rlxf pretrain``: masked pre-training on data, kept in a folder."""

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
from rlxf.cli.counts import Count, check_counts, check_from_zero
from rlxf.cli.keeping import naming
from rlxf.cli.offline_learner import WindowOptions
from rlxf.cli.pretrained import PRETRAINING
from rlxf.cli.progress import OFFLINE, progress
from rlxf.cli.resumable import (
    Start,
    config_read,
    describe_completion,
    is_complete,
    learn_resumably,
    options_of,
    train_to_completion,
)
from rlxf.cli.screen import as_table, show
from rlxf.cli.together import join_others
from rlxf.envs.trajectories import load_trajectories
from rlxf.training import RunFolder
from rlxf.training.checkpoints import EVERY_SECONDS
from rlxf.training.stopping import Stop

OWN = ("dataset", "updates", "chosen", "seed", "log_interval", "checkpoint_seconds")
"""Options of its own that ``config.json`` keeps, by which a run can go on."""


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Learn to tell masked tokens of trajectories, and keep the weights in a new folder.

    Agents begin with them by --pretrained FOLDER: "rlxf train dt", "rlxf train gtrxl". Choose the core that
    the agent shall have. The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events.
    Ctrl-C, SIGTERM and SIGUSR1 end the training and keep what was learned, and "rlxf resume" goes on with it,
    also after a crash.

    Example: rlxf pretrain --dataset rlxf/cartpole/mixed-v0 --updates 200 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """Minari id, or several to be joined; "rlxf datasets" lists those on this machine."""
    updates: Count = 100_000
    """Updates of the weights, each on one batch."""
    chosen: float = 0.15
    """Share of the tokens that are to be told."""
    download: bool = False
    """Download a dataset that is not on this machine."""
    seed: int = 0
    """Of weights, windows, masks and dropout: the same seed gives the same run on one machine."""
    run: Path | None = None
    """The new folder; None is runs/pretraining-DATASET-SEED. An existing one is refused."""
    log_interval: Count = 100
    """Updates from one line of the log to the next."""
    checkpoint_seconds: float = EVERY_SECONDS
    """Seconds from one checkpoint to the next; "rlxf resume" goes on from them, and the last three stay."""
    progress_bar: bool = True
    """Show progress: updates and loss every few seconds, and bars."""
    quiet: bool = False
    """Print warnings, errors and the final result only: neither the settings nor progress."""
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """The transformer of the agent. Here it looks both ways, and has no memory."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        join_others()
        check_counts(self, "updates", "log_interval")
        check_from_zero(self, "checkpoint_seconds", "seed")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")
        pretraining = self._made()
        run = RunFolder.create(self._path, self._config(pretraining))
        with naming(run):
            pretraining.set_logger(run.make_logger())
        return partial(self._train, pretraining, run, Start())

    @classmethod
    def of_run(cls, run: RunFolder, progress_bar: bool, quiet: bool = False, trust: bool = False) -> Self:
        """Return the original options of a run. It has no environment, so ``trust`` changes nothing.

        Raises:
            ValueError: if its ``config.json`` lacks one.
        """
        with config_read(run):
            own = {name: run.config[name] for name in OWN} | {"dataset": tuple(run.config["dataset"])}
            learner = options_of(WindowOptions, run.config)
            core = TransformerSpec.from_dict(run.config["core"])
        return cls(**own, run=run.path, progress_bar=progress_bar, quiet=quiet, learner=learner, core=core)

    def prepare_again(self, run: RunFolder) -> Callable[[], None]:
        """As `prepare`, to go on with a run that was cut off.

        Raises:
            FileNotFoundError: if none of its checkpoints is whole.
        """
        join_others()
        if is_complete(run, self.updates):
            return partial(show, describe_completion(run, "updates"))
        start = Start.of(run)
        pretraining = self._pretraining_at(start)
        pretraining.set_logger(run.continue_logger(start.log, start.steps))
        return partial(self._train, pretraining, run, start)

    def _pretraining_at(self, start: Start) -> MaskedPretraining:
        """Load the training to continue; after all updates it needs no data."""
        if start.file is not None and start.steps >= self.updates:
            return MaskedPretraining.load(start.file, device=self.learner.device)
        return self._made()

    def _made(self) -> MaskedPretraining:
        return MaskedPretraining(
            load_trajectories(self.dataset, download=self.download, progress_bar=self._speaks),
            chosen=self.chosen,
            core=self.core,
            seed=self.seed,
            **self.learner.arguments(),
        )

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"pretraining-{name}-{self.seed}") if self.run is None else self.run

    def _config(self, pretraining: MaskedPretraining) -> dict[str, Any]:
        """What the run is started with, defaults included."""
        own = {name: getattr(self, name) for name in OWN} | {"dataset": list(self.dataset)}
        read_off = {name: getattr(pretraining, name) for name in ("return_scale", "episode_length")}
        learner = asdict(self.learner) | read_off
        core = {"core": pretraining.core.to_dict()}
        return {"agent": PRETRAINING} | own | learner | core

    def _train(self, pretraining: MaskedPretraining, run: RunFolder, start: Start) -> None:
        learn = partial(self._learn, pretraining, run, start)
        with naming(run), closing(pretraining.logger):
            if not self.quiet:
                show(as_table(str(run.path), run.config))
            train_to_completion(pretraining, run, start, self.updates, learn, finish=lambda: None)

    def _learn(self, pretraining: MaskedPretraining, run: RunFolder, start: Start, stop: Stop) -> None:
        learn = partial(pretraining.learn, self.updates, log_interval=self.log_interval)
        with progress(self._speaks, "updates", self.updates, OFFLINE) as shown:
            learn_resumably(pretraining, run, learn, shown, {}, self.checkpoint_seconds, start, stop)

    @property
    def _speaks(self) -> bool:
        """True if progress is shown."""
        return self.progress_bar and not self.quiet
