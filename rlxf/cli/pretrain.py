"""``rlxf pretrain``: masked pre-training on data, kept in a folder."""

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import TransformerSpec
from rlxf.cli.counts import check_counts
from rlxf.cli.keeping import keep, naming
from rlxf.cli.offline_learner import WindowOptions
from rlxf.cli.pretrained import PRETRAINING
from rlxf.cli.screen import as_table, show
from rlxf.envs.trajectories import load_trajectories
from rlxf.training import RunFolder


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Learn to tell masked tokens of trajectories, and keep the weights in a new folder.

    Agents begin with them by --pretrained FOLDER: "rlxf train dt", "rlxf train gtrxl". Choose the core that
    the agent shall have. The folder holds config.json, checkpoint.zip, progress.csv and TensorBoard events.
    Ctrl-C ends the training and keeps what was learned.

    Example: rlxf pretrain --dataset rlxf/cartpole/mixed-v0 --updates 500 --core.width 32 --core.layers 1
    """

    dataset: tuple[str, ...]
    """Minari id, or several to be joined; "rlxf datasets" lists those on this machine."""
    updates: int = 100_000
    """Updates of the weights, each on one batch."""
    chosen: float = 0.15
    """Share of the tokens that are to be told."""
    download: bool = False
    """Download a dataset that is not on this machine."""
    seed: int = 0
    """Of weights, windows, masks and dropout: the same seed gives the same run on one machine."""
    run: Path | None = None
    """The new folder; None is runs/pretraining-DATASET-SEED. An existing one is refused."""
    log_interval: int = 100
    """Updates from one line of the log to the next."""
    progress_bar: bool = True
    """Show progress bars."""
    learner: Annotated[WindowOptions, arg(name="")] = WindowOptions()
    core: TransformerSpec = decision_transformer()
    """The transformer of the agent. Here it looks both ways, and has no memory."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        check_counts(self, "updates", "log_interval")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")
        pretraining = MaskedPretraining(
            load_trajectories(self.dataset, download=self.download, progress_bar=self.progress_bar),
            chosen=self.chosen,
            core=self.core,
            seed=self.seed,
            **self.learner.arguments(),
        )
        run = RunFolder.create(self._path, self._config(pretraining))
        pretraining.set_logger(run.make_logger())
        return partial(self._train, pretraining, run)

    @property
    def _path(self) -> Path:
        name = re.sub(r"[^\w.-]+", "-", "+".join(self.dataset))
        return Path("runs", f"pretraining-{name}-{self.seed}") if self.run is None else self.run

    def _config(self, pretraining: MaskedPretraining) -> dict[str, Any]:
        """What the run is started with, defaults included."""
        own = {name: getattr(self, name) for name in ("updates", "chosen", "seed")}
        read_off = {name: getattr(pretraining, name) for name in ("return_scale", "episode_length")}
        learner = asdict(self.learner) | read_off
        core = {"core": pretraining.core.to_dict()}
        return {"agent": PRETRAINING, "dataset": list(self.dataset)} | own | learner | core

    def _train(self, pretraining: MaskedPretraining, run: RunFolder) -> None:
        show(as_table(str(run.path), run.config))
        with naming(run), closing(pretraining.logger):
            try:
                pretraining.learn(
                    self.updates, log_interval=self.log_interval, progress_bar=self.progress_bar
                )
            finally:
                keep(pretraining, run)
