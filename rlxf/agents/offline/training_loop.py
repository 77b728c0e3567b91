"""Training loop of offline agents: updates on batches of windows, logs, and the start of a resumed run."""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback, ProgressBarCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import configure_logger, update_learning_rate
from torch import nn

from rlxf.agents.common import arguments
from rlxf.agents.common.compiled_losses import CompiledLosses
from rlxf.agents.common.numerics import check_parameters, numerical_error_context
from rlxf.agents.common.weights import sync_processes
from rlxf.agents.offline import checkpoint
from rlxf.agents.offline.config import OfflineConfig
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.model import OfflineModel
from rlxf.agents.offline.optimizer_step import OfflineUpdate, ProgressBar, warmup_factor
from rlxf.agents.offline.sb3_arguments import SB3_LEARN_ARGUMENTS
from rlxf.agents.offline.validation import ValidatedAlgorithm
from rlxf.agents.offline.weight_averaging import WeightAverage
from rlxf.data import Windows
from rlxf.training import Archive
from rlxf.training.checkpoints import load_callback_states
from rlxf.training.process_group import ProcessGroup
from rlxf.training.tensorboard import write_hyperparameters, write_layout
from rlxf.utils.allocator import keep_freed_memory
from rlxf.utils.checks import as_whole_number
from rlxf.utils.tensorboard import writes_tensorboard


class OfflineTrainingLoop(ValidatedAlgorithm):
    """Part of `OfflineAlgorithm` that trains its model; ``num_timesteps`` counts updates."""

    NAME: ClassVar[str]
    """Name of the algorithm in files and logs."""
    config_class: ClassVar[type[OfflineConfig]]
    ranks: ProcessGroup
    generator: torch.Generator
    """Generator of batches."""
    optimizer: torch.optim.AdamW
    warmup_updates: int | None
    max_grad_norm: float
    weight_averaging: float | None
    gradient_accumulation_steps: int
    _average: WeightAverage | None
    _compiled: CompiledLosses | None
    _update: OfflineUpdate

    @property
    def config(self) -> OfflineConfig:
        """Training arguments with their current values."""
        return self.config_class.of(vars(self))

    def _make_update(self, trained: OfflineModel) -> OfflineUpdate:
        """Return an update of a model without pending metrics."""
        return OfflineUpdate(
            trained,
            self.optimizer,
            max_grad_norm=self.max_grad_norm,
            average=self._average,
            accumulation_steps=self.gradient_accumulation_steps,
            compiled=self._compiled,
        )

    def _new_update(self) -> OfflineUpdate:
        """Return an update of the trained model without pending metrics."""
        return self._make_update(self._update.trained)

    def _models(self) -> nn.ModuleList:
        """Return the model that acts, and with `weight_averaging` also the one that is trained."""
        return nn.ModuleList([self.policy] if self._average is None else [self.policy, self._update.trained])

    @arguments.reject_unknown_arguments(SB3_LEARN_ARGUMENTS)
    def learn(
        self,
        steps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 100,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train for ``steps`` updates. In SB3 this argument counts environment steps.

        Args:
            steps: number of updates, each on one batch of windows; a whole number such as 10_000 or 1e4.
            callback: SB3 callback, called after each update.
            log_interval: number of updates between log outputs; None for no log. Updates after
                the last output are not logged, so a longer training has the same log.
            tb_log_name: name of the run in TensorBoard; None for `NAME`.
            reset_num_timesteps: restart warm-up and schedules; False to continue them. With
                ``warmup_updates=None``, the warm-up is a tenth of the new total, so a continued training may
                enter it again; set ``warmup_updates`` to prevent this.
            progress_bar: show a progress bar.
            resume_from: a file that `save` wrote during training, or a folder of `CheckpointWriter`, whose
                newest intact file is used. Training continues from there to ``steps`` updates in total. On
                one machine the result is bitwise equal to that of an uninterrupted run. The agent must be
                built with the same arguments and data. Sets the global generators of torch, numpy and Python.

        Raises:
            TypeError: if steps or log_interval is not a number.
            ValueError: if steps or log_interval is less than 1 or has a fraction, the agent was loaded
                without a dataset, or its settings or data differ from those in ``resume_from``. The
                agent stays unchanged. During training, if the schedule of the learning rate becomes negative
                or is not finite.
            FileNotFoundError: if ``resume_from`` does not exist.
            CheckpointError: if the file is truncated, altered or of another format.
            NumericalError: before the first update, if a parameter is not finite or would make a recurrent
                state overflow; during training, if the loss, a gradient or a recurrent state is NaN or
                infinite. The weights are those before the update.
        """
        update = self._new_update()
        windows = self._training_windows(self.policy.needed_columns(self.windows(self._data())))
        self.resumable = True
        try:
            return self._learn(
                update,
                windows,
                steps,
                callback,
                log_interval=log_interval,
                tb_log_name=tb_log_name or self.NAME,
                reset_num_timesteps=reset_num_timesteps,
                progress_bar=progress_bar,
                resume_from=resume_from,
            )
        finally:
            self.resumable = False

    @property
    def has_resumable_training(self) -> bool:
        """True if the present training can be resumed at some moments: it is no distillation."""
        return self._update.resumable

    def _learn(
        self,
        update: OfflineUpdate,
        windows: Windows,
        steps: int,
        callback: MaybeCallback,
        *,
        log_interval: int | None,
        tb_log_name: str,
        reset_num_timesteps: bool,
        progress_bar: bool,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Run the training loop with the given update and windows; arguments as in `learn`."""
        steps = as_whole_number("steps", steps, least=1)
        log_interval = arguments.as_log_interval(log_interval)
        steps, run = self._restore_start(steps, resume_from, checkpoint.read_resumable_run)
        counts = {"num_timesteps": self.num_timesteps, "n_updates": self._n_updates, "steps": steps}
        self.check_processes()
        sync_processes(self.ranks, self._models(), self.generator, self.set_logger, **counts)
        total_timesteps, callback = self._setup_learn(
            steps, callback, reset_num_timesteps and run is None, tb_log_name, progress_bar
        )
        self._update = update
        callback.on_training_start(locals(), globals())
        if run is not None:
            load_callback_states(callback, run)
            checkpoint.restore_training_state(update, run)
        self._run_updates(windows, total_timesteps, callback, log_interval)
        callback.on_training_end()
        return self

    def check_processes(self) -> None:
        """Raise ValueError if the agent cannot be trained by the processes of a process group."""
        self.policy.check_processes(self.ranks.world_size)

    def _restore_start(
        self,
        steps: int,
        resume_from: str | os.PathLike[str] | None,
        read_run: Callable[[str | os.PathLike[str], Any, int], Archive],
    ) -> tuple[int, Archive | None]:
        """Restore the agent of a checkpoint from which a training continues, if there is one.

        Its pending metrics and the random generators are those of `restore_training_state`, which is called
        last.

        Args:
            steps: requested total number of steps.
            resume_from: path of the checkpoint; None for a new training.
            read_run: reads a checkpoint, given its path, the description of the agent and ``steps``.

        Returns:
            The remaining steps, and the checkpoint or None.
        """
        keep_freed_memory()
        run = None
        info = self._training_info()
        if resume_from is not None:
            run = read_run(resume_from, self._describe(info), steps)
            self._restore(run)
            steps -= self.num_timesteps
        self.dataset_info = info
        return steps, run

    def _run_updates(
        self, windows: Windows, total_timesteps: int, callback: BaseCallback, log_interval: int
    ) -> None:
        """Run updates until ``total_timesteps``, or until a callback stops the training."""
        warm_updates = total_timesteps // 10 if self.warmup_updates is None else self.warmup_updates
        while self.num_timesteps < total_timesteps:
            factor = warmup_factor(self.num_timesteps, warm_updates)
            self.train(windows, factor * self.lr_schedule(self.progress_remaining))
            self.num_timesteps += 1
            if self.num_timesteps % log_interval == 0:
                self.dump_logs()
            callback.update_locals(locals())
            if not callback.on_step():
                break

    @property
    def progress_remaining(self) -> float:
        """Remaining fraction of the training, from 1 to 0, also if the last step of several environments
        exceeds the total.
        """
        self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
        return max(0.0, self._current_progress_remaining)

    def train(self, windows: Windows, learning_rate: float) -> None:
        """Run one update on a batch of windows.

        Raises:
            ValueError: before the optimizer step, if the learning rate is negative or not finite.
            NumericalError: before the optimizer step, if the loss or a gradient is NaN or infinite.
        """
        if not 0 <= learning_rate < math.inf:
            raise ValueError(
                f"the schedule learning_rate={self.learning_rate!r} gives {learning_rate} in update "
                f"{self._n_updates + 1}; it must be finite and at least 0 until the end of the training"
            )
        update_learning_rate(self.optimizer, learning_rate)
        self._update.begin()
        batch = self._batch(windows)
        where = f"update {self._n_updates + 1}"
        rank_rng = self.ranks.rank_rng(self.generator)
        with numerical_error_context(where, batch), rank_rng:
            self._update(batch)
        self._n_updates += 1

    def _batch(self, windows: Windows) -> Any:
        """Sample the batch of an update."""
        starts = windows.draw(self.batch_size, self.generator)
        return windows.starting_at(self.ranks.local_rows(starts)).to(self.device)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """Check the parameters, and prepare training as SB3 does, without an environment to reset."""
        arguments.check_gradients_enabled()
        for model in self._models():
            check_parameters(model)
        self.start_time = time.time_ns()
        self.num_timesteps = 0 if reset_num_timesteps else self.num_timesteps
        self._num_timesteps_at_start = self.num_timesteps
        self._total_timesteps = self.num_timesteps + total_timesteps
        self._n_updates_at_start = self._n_updates
        self.ep_info_buffer = deque(maxlen=self._stats_window_size)
        self.ep_success_buffer = deque(maxlen=self._stats_window_size)
        if not self._custom_logger:
            self._logger = configure_logger(
                self.verbose, self.tensorboard_log, tb_log_name, reset_num_timesteps
            )
        if writes_tensorboard(self.logger):
            values = self.config.hyperparameters(type(self).__name__, self.dataset_info)
            write_hyperparameters(self.logger, values)
            losses = ["train/loss", *["validation/loss"] * (self.validation_fraction is not None)]
            write_layout(self.logger, losses, targets=getattr(self, "return_conditioned", False))
        return self._total_timesteps, self._init_callback(callback, progress_bar)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        """Initialize callbacks as SB3 does, with a progress bar that needs no environment."""
        given = callback if isinstance(callback, list) else [callback]
        given = [ProgressBar() if type(each) is ProgressBarCallback else each for each in given]
        callbacks = [each if isinstance(each, BaseCallback) else ConvertCallback(each) for each in given]
        return super()._init_callback([*callbacks, ProgressBar()] if progress_bar else callbacks)

    def dump_logs(self) -> None:
        """Log the means of metrics over the updates since the last call, and the training speed."""
        for name, value in self._update.pop_metric_means().items():
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/learning_rate", self.optimizer.param_groups[0]["lr"])
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        seconds = max((time.time_ns() - self.start_time) / 1e9, 1e-9)
        updates = self._n_updates - self._n_updates_at_start
        self.logger.record("time/updates_per_second", updates / seconds)
        self.logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        self.logger.dump(self.num_timesteps)

    def _describe(self, info: DatasetInfo) -> dict[str, Any]:
        """Return the description of the agent with this information about its data."""
        return checkpoint.describe(self.NAME, self.config, info, self._progress())
