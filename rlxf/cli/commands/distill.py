"""``rlxf distill``: distill the agent of a run into a smaller student, saved as a new run."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from rlxf.agents.common.datastore import TEACHER_REASON, check_no_datastore
from rlxf.agents.common.losses import Distillation
from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.attention import TransformerSpec
from rlxf.cli.options import (
    Command,
    Device,
    Quiet,
    Track,
    Trust,
    check_counts,
    check_new_folder,
    options,
)
from rlxf.cli.progress import OFFLINE_METRICS, ONLINE_METRICS, progress
from rlxf.cli.runs import (
    OFFLINE,
    TRANSFORMERS,
    agent_name,
    command_class,
    dataset_ids,
    load_agent,
    make_env,
)
from rlxf.cli.settings_table import print_settings
from rlxf.cli.torchrun_job import init_distributed
from rlxf.cli.training_command import TrainingCommand
from rlxf.cli.training_session import error_context, save_agent
from rlxf.training import RunFolder
from rlxf.training.distributed import process_group
from rlxf.training.trackers import attach_tracker, check_tracker
from rlxf.utils.run_files import TEACHER


@options
class Distill(Command):
    """Distill the agent of a run into a smaller student, and save the student in a new folder.

    The student has the techniques and settings of its teacher, except for the options below. By default its
    width is half that of the teacher. The feed-forward width changes in proportion to the width. The student
    trains on the same datasets or in the same task as the teacher did. "rlxf evaluate" evaluates it as any
    other run.

    Example: rlxf distill runs/gtrxl-rlxf-TMaze-v0-0 --steps 20000 --layers 1
    """

    teacher: Positional[Path]
    """Folder of the teacher's run."""
    steps: int = 100_000
    """Number of updates of a Decision Transformer, or of environment steps of a GTrXLPPO."""
    width: int | None = None
    """Model width: features per token. None means half of the teacher's."""
    layers: int | None = None
    """Number of layers. None means the teacher's. With fewer layers, the student acts faster."""
    heads: int | None = None
    """Number of attention heads. None means the teacher's."""
    temperature: float = 2.0
    """Temperature that flattens the compared action distributions. 1 leaves them as they are."""
    hidden_coef: float = 1.0
    """Coefficient of the loss between hidden states. 0 turns it off."""
    actor: Literal["student", "teacher"] = "student"
    """Agent that acts in the environments of a GTrXLPPO. It does not apply to Decision Transformers."""
    seed: int = 0
    """Seed of weights, windows, actions and environments. Equal seeds give equal runs on one machine."""
    run: Path | None = None
    """New folder of the run. None means the folder of the teacher with the suffix "-student".
    It must not exist."""
    trust: Trust = False
    progress_bar: bool = True
    """Show steps, returns and losses every few seconds."""
    quiet: Quiet = False
    track: Track = None
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Load the teacher, build the student, create the run, and return the training to run."""
        init_distributed()
        process_group().check_single_process("rlxf distill")
        check_counts(self, "steps", "width", "layers", "heads")
        check_tracker(self.track)
        check_new_folder(self._path)
        distillation = Distillation(self.temperature, self.hidden_coef)
        source = RunFolder.open(self.teacher)
        build = self._build_offline if agent_name(source, TRANSFORMERS) == OFFLINE else self._build_online
        teacher, student = build(source)
        check_no_datastore(teacher.datastore, TEACHER_REASON)
        if isinstance(student, DecisionTransformer):
            student.check_teacher(teacher, distillation)
        run = RunFolder.create(self._path, self._config(source, student))
        student.set_logger(attach_tracker(run.make_logger(), self.track, run.path, run.config))
        return partial(self._train, teacher, student, distillation, run)

    @property
    def _path(self) -> Path:
        if self.run is not None:
            return self.run
        teacher = self.teacher.resolve() if self.teacher.name in ("", "..") else self.teacher
        return teacher.with_name(f"{teacher.name}-student")

    def _build_offline(self, source: RunFolder) -> tuple[Any, Any]:
        """Return the teacher, and a student on the same datasets."""
        if self.actor != "student":
            raise ValueError(
                f"--actor applies to GTrXLPPO only, got {self.actor}: a Decision Transformer is trained on "
                f"datasets, without environments"
            )
        teacher = DecisionTransformer.load(source.final_checkpoint, device=self.device)
        settings = vars(teacher.config) | self._student_settings(teacher.core)
        return teacher, DecisionTransformer(dataset_ids(source), device=self.device, **settings)

    def _build_online(self, source: RunFolder) -> tuple[Any, Any]:
        """Return the teacher, and a student in environments with the same task and normalization."""
        command: type[TrainingCommand] = command_class(source)
        n_envs = command.of_run(source, self.progress_bar).learner.n_envs
        env = make_env(source, None, {}, n_envs, self.trust, self.seed)
        teacher = load_agent(source, env, source.final_checkpoint, self.device)
        assert isinstance(teacher, GTrXLPPO)
        settings = teacher.constructor_settings() | self._student_settings(teacher.core)
        return teacher, GTrXLPPO(type(teacher.policy), teacher.env, device=self.device, **settings)

    def _student_settings(self, core: TransformerSpec) -> dict[str, Any]:
        """Return the constructor arguments that differ from those of the teacher."""
        options = {name: getattr(self, name) for name in ("width", "layers", "heads")}
        given = {name: size for name, size in options.items() if size is not None}
        sizes = {"width": core.width // 2} | given
        hidden = core.feed_forward and max(1, core.feed_forward * sizes["width"] // core.width)
        small = replace(core, feed_forward=hidden, **sizes)
        return {"core": small, "seed": self.seed}

    def _config(self, source: RunFolder, student: Any) -> dict[str, Any]:
        """Return the configuration of the teacher's run, updated with the options of the student."""
        names = ("steps", "temperature", "hidden_coef", "actor", "seed", "track", "device")
        own = {name: getattr(self, name) for name in names}
        return source.config | own | {TEACHER: str(self.teacher), "core": student.core.to_dict()}

    def _train(self, teacher: Any, student: Any, distillation: Distillation, run: RunFolder) -> None:
        online = isinstance(student, GTrXLPPO)
        unit, actor = ("steps", {"actor": self.actor}) if online else ("updates", {})
        rollout = student.n_envs_total * student.n_steps if online else 1
        total = -(-self.steps // rollout) * rollout
        verbose = self.progress_bar and not self.quiet
        with error_context(run), closing(student.logger):
            if not self.quiet:
                print_settings(run, self, student)
            with progress(verbose, unit, total, ONLINE_METRICS | OFFLINE_METRICS) as callbacks:
                try:
                    student.distill(teacher, self.steps, distillation, callback=callbacks, **actor)
                finally:
                    save_agent(student, run)
            run.complete(student.num_timesteps)
