"""Base class of algorithms that are trained offline on windows of trajectories."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback, ProgressBarCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import configure_logger, get_device, update_learning_rate
from torch import nn

from rlxf.agents.common import arguments
from rlxf.agents.common.captured_function import supports_graphs
from rlxf.agents.common.checkpoint import read_agent_archive
from rlxf.agents.common.compiled_losses import CompiledLosses
from rlxf.agents.common.numerics import check_parameters, numerical_error_context
from rlxf.agents.common.precision import Precision, check_precision
from rlxf.agents.common.weights import sync_processes
from rlxf.agents.offline import checkpoint
from rlxf.agents.offline.config import OfflineConfig, check_no_policy
from rlxf.agents.offline.dataset_info import DatasetInfo, warn_of_other_returns
from rlxf.agents.offline.model import OfflineModel
from rlxf.agents.offline.optimizer_step import (
    UNCLIPPED,
    OfflineUpdate,
    ProgressBar,
    make_optimizer,
    warmup_factor,
)
from rlxf.agents.offline.sb3_arguments import SB3_LEARN_ARGUMENTS
from rlxf.agents.offline.trajectory_model import TrajectoryModel
from rlxf.agents.offline.validation import ValidatedAlgorithm
from rlxf.agents.offline.weight_averaging import WeightAverage
from rlxf.attention import TransformerSpec
from rlxf.data import Trajectories, Windows, as_trajectories, check_spaces_match
from rlxf.data.dataset_source import Dataset
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors, checkpoint_errors_unless_overridden
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import write_hyperparameters, writes_tensorboard
from rlxf.training.states import check_buildable
from rlxf.training.tensorboard import write_layout
from rlxf.utils.allocator import keep_freed_memory


class OfflineAlgorithm(ValidatedAlgorithm):
    """SB3 ``BaseAlgorithm`` that trains on windows of ``context_length`` steps.

    ``num_timesteps`` counts updates instead of environment steps.

    Args:
        policy_class: class of the model to train.
        dataset: training data; None for an agent that `load` builds.
        config: training arguments. They are also attributes of the agent, as in SB3.
        download: True to download a dataset that is not on this machine.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        device: "auto", "cpu" or "cuda".
    """

    NAME: ClassVar[str]
    """Name of the algorithm in files and logs."""
    config_class: ClassVar[type[OfflineConfig]]
    progress_unit: ClassVar[str] = "update"
    """Unit of ``num_timesteps``, for titles."""
    policy_class: type[OfflineModel]  # type: ignore[assignment]
    policy: OfflineModel
    optimizer: torch.optim.AdamW
    context_length: int
    weight_decay: float
    warmup_updates: int | None
    max_grad_norm: float
    weight_averaging: float | None
    gradient_accumulation_steps: int
    precision: Precision
    cuda_graphs: bool
    _average: WeightAverage | None

    def __init__(
        self,
        policy_class: type[OfflineModel],
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        config: OfflineConfig,
        download: bool,
        tensorboard_log: str | None,
        device: torch.device | str,
        _init_setup_model: bool,
    ):
        arguments.check_device(device)
        check_no_policy(dataset)
        config.check()
        check_precision(config.precision, get_device(device))
        self.ranks = process_group()
        self.ranks.split_total("batch_size", config.batch_size)
        vars(self).update(vars(config))
        super().__init__(
            policy_class,  # type: ignore[arg-type]  # SB3 expects a BasePolicy
            None,
            config.learning_rate,
            tensorboard_log=tensorboard_log,
            verbose=config.verbose,
            device=device,
            seed=config.seed,
        )
        torch.set_flush_denormal(True)
        self.trajectories = None
        self.resumable = False
        if dataset is None and _init_setup_model:
            raise ValueError("dataset is None: give a Minari id, a MinariDataset, or a list of them")
        if dataset is not None:
            self._set_dataset(as_trajectories(dataset, download))
        if _init_setup_model:
            self._setup_model()

    @property
    def config(self) -> OfflineConfig:
        """Training arguments with their current values."""
        return self.config_class.of(vars(self))

    def _set_dataset(self, trajectories: Trajectories) -> None:
        """Set the training data, and derive from it the settings that are None."""
        self.dataset_info = DatasetInfo.of(trajectories)
        warn_of_other_returns(trajectories)
        self.trajectories = trajectories
        vars(self).update(self.config.settings_from_data(trajectories))

    def _setup_model(self) -> None:
        info = self.dataset_info
        data = self.trajectories
        self.observation_space, self.action_space = info.observation_space, info.action_space
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        normalization = info.uninitialized_normalization() if data is None else data.normalization()
        self.policy = self.policy_class(info, normalization, self.config).to(self.device)
        if data is not None:
            self.policy.fit(data)
            self._training_windows(self.windows(data))
            self.policy.check_data(data, self.device)
        trained = self.policy
        self._average = None
        if self.weight_averaging is not None:
            trained = deepcopy(self.policy)
            self._average = WeightAverage(trained, self.policy, self.weight_averaging, UNCLIPPED)
        self.optimizer = make_optimizer(trained, self.lr_schedule(1), self.weight_decay)
        captures = self.cuda_graphs and supports_graphs(self.device)
        self._compiled = CompiledLosses(self.device.type) if captures else None
        self._update = self._make_update(trained)

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
        windows = self._training_windows(self.windows(self._data()))
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
        steps = arguments.as_whole_number("steps", steps, least=1)
        log_interval = arguments.as_log_interval(log_interval)
        steps, run = self._restore_start(steps, resume_from, checkpoint.read_resumable_run)
        counts = {"num_timesteps": self.num_timesteps, "n_updates": self._n_updates, "steps": steps}
        self.policy.check_processes(self.ranks.world_size)
        sync_processes(self.ranks, self._models(), self.generator, self.set_logger, **counts)
        total_timesteps, callback = self._setup_learn(
            steps, callback, reset_num_timesteps and run is None, tb_log_name, progress_bar
        )
        self._update = update
        callback.on_training_start(locals(), globals())
        if run is not None:
            checkpoint.restore_training_state(update, run)
        self._run_updates(windows, total_timesteps, callback, log_interval)
        callback.on_training_end()
        return self

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
            losses = ["train/loss", *["validation/loss"] * (self.validation_share is not None)]
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

    def _checkpoint(self) -> Archive:
        return checkpoint.build_archive(self._description(), self._update, self.generator)

    def _description(self) -> dict[str, Any]:
        return self._describe(self.dataset_info)

    def _describe(self, info: DatasetInfo) -> dict[str, Any]:
        """Return the description of the agent with this information about its data."""
        return checkpoint.describe(self.NAME, self.config, info, self._progress())

    def _training_info(self) -> DatasetInfo:
        """Return the information about the current dataset, with the spaces for which the agent was made."""
        current = self.dataset_info
        new = current if self.trajectories is None else DatasetInfo.of(self.trajectories)
        return replace(new, observation_space=current.observation_space, action_space=current.action_space)

    def set_parameters(
        self,
        load_path_or_dict: Any,
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Load the weights of SB3's ``get_parameters``; with `weight_averaging`, a new average starts.

        Raises:
            TypeError: if the argument is not a dict. Files are opened by `load`.
        """
        if not isinstance(load_path_or_dict, Mapping):
            raise TypeError(
                f"set_parameters takes the dict of get_parameters, got {load_path_or_dict!r}; open a file "
                f"with {type(self).__name__}.load"
            )
        super().set_parameters(dict(load_path_or_dict), exact_match, device)
        if "policy" in load_path_or_dict:
            self._update.restart_average()

    @checkpoint_errors()
    def _restore(self, archive: Archive) -> None:
        checkpoint.restore(self._update, self.generator, archive)
        self._restore_progress(archive)

    def load_training_state(self, path: str | os.PathLike[str]) -> Self:
        """Restore the training state of a file of `rlxf.training.CheckpointWriter`, without further training.

        Restores weights, optimizer, progress, pending metrics of the log, and the global generators of torch,
        numpy and Python.

        Args:
            path: path of the file, or of a folder of checkpoints.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        archive = checkpoint.read_matching_run(path, self._description())
        self._restore(archive)
        checkpoint.restore_training_state(self._update, archive)
        return self

    @classmethod
    def load(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        dataset: Dataset | Sequence[Dataset] | Trajectories | None = None,
        device: torch.device | str = "auto",
        sha256: str | None = None,
        **settings: Any,
    ) -> Self:
        """Load an agent that `save` wrote; arguments and errors as in `OfflineAgent.load`."""
        arguments.check_device(device)
        settings = arguments.load_settings(settings)
        archive = read_agent_archive(path, cls.NAME, checkpoint.GROUPS, sha256)
        stored = checkpoint.read_config(archive, cls.config_class)
        stored.check_changes(settings)
        merged = vars(stored) | settings
        with stored.load_error_context(settings):
            with checkpoint_errors_unless_overridden(settings):
                info = checkpoint.read_dataset_info(archive)
                check_buildable(
                    lambda: cls._build(info, "meta", merged | {"verbose": 0}).policy,
                    archive.tensors["policy"],
                    cls.config_class.of(merged).inference_memory(info),
                )
                agent = cls._build(info, device, merged)
            seeded = agent.generator.get_state()
            agent._restore(archive)
            if "seed" in settings:
                agent.generator.set_state(seeded)
        if dataset is not None:
            agent._attach_dataset(as_trajectories(dataset, merged.get("download", False)))
        return agent

    @classmethod
    def _build(cls, info: DatasetInfo, device: torch.device | str, settings: dict[str, Any]) -> Self:
        """Build an agent for data with this information, with new weights; its settings are those passed."""
        constructor: Any = cls  # the constructor of each subclass accepts the arguments in its files
        agent: Self = constructor(None, device=device, **settings, _init_setup_model=False)
        agent.dataset_info = info
        agent._setup_model()
        return agent

    def _attach_dataset(self, trajectories: Trajectories) -> None:
        """Set the training data of a loaded agent, whose settings stay those of its file.

        Raises:
            DatasetError, ValueError: if they do not suit the agent.
        """
        check_spaces_match(self.dataset_info, trajectories.observation_space, trajectories.action_space)
        self.policy.check_episodes(trajectories, np.arange(trajectories.episodes))
        self.policy.check_data(trajectories, self.device)
        self.trajectories = trajectories

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "optimizer"], []


class TrajectoryAlgorithm(OfflineAlgorithm):
    """`OfflineAlgorithm` whose model is a transformer over trajectories."""

    policy: TrajectoryModel
    core: TransformerSpec
    return_scale: float | None
    episode_length: int | None
