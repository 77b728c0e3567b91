"""``rlxf distill``: a small agent learns from that of a run, and is kept in a folder of its own."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.decision_transformer import checkpoint as offline_checkpoint
from rlxf.agents.distillation import Distillation
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl import checkpoint as online_checkpoint
from rlxf.agents.remembering import check_teaches_by_itself
from rlxf.attention import TransformerSpec
from rlxf.cli.counts import Count, check_counts
from rlxf.cli.keeping import keep, naming
from rlxf.cli.players import OFFLINE, Agent, agent_name, load_agent
from rlxf.cli.progress import OFFLINE as OFFLINE_FIGURES
from rlxf.cli.progress import ONLINE as ONLINE_FIGURES
from rlxf.cli.progress import progress
from rlxf.cli.screen import as_table, show
from rlxf.cli.task import Task
from rlxf.cli.together import join_others
from rlxf.training import RunFolder
from rlxf.training.joining import here


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Let a small agent learn from that of a run, and keep it in a new folder.

    The student has the teacher's techniques and settings, and the sizes that are given here. It learns where
    the teacher did: from the same datasets, or in the same task. "rlxf evaluate" plays with either.

    Example: rlxf distill runs/gtrxl-rlxf-TMaze-v0-0 --steps 20000 --layers 1
    """

    teacher: Positional[Path]
    """Folder of the teacher's run."""
    steps: Count = 100_000
    """Updates of a Decision Transformer; of a GTrXLPPO steps in its environments, over all of them."""
    width: Count | None = None
    """Features of a token; None is half of the teacher's."""
    layers: Count | None = None
    """Number of layers; None is the teacher's. Fewer make it act faster."""
    heads: Count | None = None
    """Attention heads; None is the teacher's."""
    temperature: float = 2.0
    """At which distributions are compared; 1 is as they act."""
    hidden_coef: float = 1.0
    """Weight of the likeness of hidden states; 0 for none."""
    actor: Literal["student", "teacher"] = "student"
    """Who plays while a GTrXLPPO learns. A Decision Transformer learns from data: nobody plays."""
    seed: int = 0
    """Of weights, windows, actions and environments: the same seed gives the same run on one machine."""
    run: Path | None = None
    """The new folder; None is that of the teacher with "-student" behind. An existing one is refused."""
    trust: bool = False
    """Trust the authors of the run and its data: the module that their environment names is imported, and its
    arguments and wrappers are used. Without this flag only registered environments are used."""
    progress_bar: bool = True
    """Show progress: steps, returns and losses every few seconds."""
    quiet: bool = False
    """Print warnings, errors and the final result only: neither the settings nor progress."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPU if there is one."""

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        join_others()
        here().check_alone("rlxf distill")
        check_counts(self, "steps", "width", "layers", "heads")
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists; choose another folder with --run, or move it away")
        distillation = Distillation(self.temperature, self.hidden_coef)
        taught = RunFolder.open(self.teacher)
        teacher, student = (self._offline if agent_name(taught) == OFFLINE else self._online)(taught)
        check_teaches_by_itself(teacher.memory)
        run = RunFolder.create(self._path, self._config(taught, student))
        student.set_logger(run.make_logger())
        return partial(self._train, teacher, student, distillation, run)

    @property
    def _path(self) -> Path:
        return self.teacher.with_name(f"{self.teacher.name}-student") if self.run is None else self.run

    def _offline(self, taught: RunFolder) -> tuple[Agent, Agent]:
        """The teacher, and a student of the same data."""
        if self.actor != "student":
            raise ValueError(
                f"actor says who plays, got {self.actor}: a Decision Transformer learns from data, where "
                f"nobody plays"
            )
        teacher = DecisionTransformer.load(taught.checkpoint, device=self.device)
        settings = offline_checkpoint.constructor_settings(teacher) | self._own(teacher.core)
        return teacher, DecisionTransformer(taught.config["dataset"], device=self.device, **settings)

    def _online(self, taught: RunFolder) -> tuple[Agent, Agent]:
        """The teacher, and a student in environments of the same task, which show what the teacher knows."""
        n_envs = taught.config["n_envs"]
        env = Task.of_run(taught.config, None, {}, self.trust).make(n_envs, self.seed)
        teacher = load_agent(taught, env, taught.checkpoint, self.device)
        assert isinstance(teacher, GTrXLPPO)
        settings = online_checkpoint.constructor_settings(teacher) | self._own(teacher.core)
        return teacher, GTrXLPPO(type(teacher.policy), teacher.env, device=self.device, **settings)

    def _own(self, core: TransformerSpec) -> dict[str, Any]:
        """What the student has of its own."""
        asked = {name: getattr(self, name) for name in ("width", "layers", "heads")}
        given = {name: size for name, size in asked.items() if size is not None}
        small = replace(core, feed_forward=None, **({"width": core.width // 2} | given))
        return {"core": small, "seed": self.seed}

    def _config(self, taught: RunFolder, student: Agent) -> dict[str, Any]:
        """That of the teacher's run, with what is other here."""
        own = {name: getattr(self, name) for name in ("steps", "temperature", "hidden_coef", "actor", "seed")}
        return taught.config | own | {"teacher": str(self.teacher), "core": student.core.to_dict()}

    def _train(self, teacher: Any, student: Any, distillation: Distillation, run: RunFolder) -> None:
        if not self.quiet:
            show(as_table(str(run.path), run.config))
        online = isinstance(student, GTrXLPPO)
        actor = {"actor": self.actor} if online else {}
        unit, figures = (
            ("steps", ONLINE_FIGURES | OFFLINE_FIGURES) if online else ("updates", OFFLINE_FIGURES)
        )
        shown = self.progress_bar and not self.quiet
        with naming(run), closing(student.logger), progress(shown, unit, self.steps, figures) as callbacks:
            try:
                student.learn_from(teacher, self.steps, distillation, callback=callbacks, **actor)
            finally:
                keep(student, run)
