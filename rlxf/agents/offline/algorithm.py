"""Base class of algorithms that are trained offline: constructor, dataset and files."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Self

import numpy as np
import torch
from stable_baselines3.common.utils import get_device

from rlxf.agents.common import arguments
from rlxf.agents.common.captured_function import supports_graphs
from rlxf.agents.common.checkpoint import read_agent_archive
from rlxf.agents.common.compiled_losses import CompiledLosses
from rlxf.agents.common.precision import Precision, check_precision
from rlxf.agents.offline import checkpoint
from rlxf.agents.offline.config import OfflineConfig, check_no_policy
from rlxf.agents.offline.data_warnings import (
    warn_of_other_moments,
    warn_of_other_returns,
    warn_of_other_scales,
)
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.model import OfflineModel
from rlxf.agents.offline.optimizer_step import UNCLIPPED, make_optimizer
from rlxf.agents.offline.training_loop import OfflineTrainingLoop
from rlxf.agents.offline.weight_averaging import WeightAverage
from rlxf.data import Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import warn_of_flattened_images, warn_of_narrow_actions
from rlxf.data.space_comparison import agent_mismatch
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors, checkpoint_errors_unless_overridden
from rlxf.training.distributed import process_group
from rlxf.training.states import check_buildable


class OfflineAlgorithm(OfflineTrainingLoop):
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

    progress_unit: ClassVar[str] = "update"
    """Unit of ``num_timesteps``, for titles."""
    policy_class: type[OfflineModel]  # type: ignore[assignment]
    policy: OfflineModel  # type: ignore[assignment]
    context_length: int
    weight_decay: float
    precision: Precision
    cuda_graphs: bool

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

    def _set_dataset(self, trajectories: Trajectories) -> None:
        """Set the training data, and derive from it the settings that are None."""
        self.dataset_info = DatasetInfo.of(trajectories)
        self._warn_of_data(trajectories)
        self.trajectories = trajectories
        vars(self).update(self.config.settings_from_data(trajectories))

    def _warn_of_data(self, trajectories: Trajectories) -> None:
        """Warn about training data from which the agent may not learn as intended."""
        warn_of_other_returns(trajectories)
        warn_of_other_moments(trajectories)
        warn_of_narrow_actions(trajectories)
        warn_of_flattened_images(trajectories)

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

    def _checkpoint(self) -> Archive:
        return checkpoint.build_archive(self._description(), self._update, self.generator)

    def _description(self) -> dict[str, Any]:
        return self._describe(self.dataset_info)

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
        archive = self.check_training_state(path)
        self._restore(archive)
        checkpoint.restore_training_state(self._update, archive)
        return self

    def check_training_state(self, path: str | os.PathLike[str]) -> Archive:
        """Return the content of a file for `load_training_state`, after a comparison with settings and data.

        Raises:
            FileNotFoundError, CheckpointError, ValueError: as `learn` with ``resume_from``.
        """
        return checkpoint.read_matching_run(path, self._description())

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
        stored = checkpoint.read_config(archive, cls.config_class, settings)
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
            data = as_trajectories(dataset, merged.get("download", False))
            agent._attach_dataset(data, "return_scale" in settings)
        return agent

    @classmethod
    def _build(cls, info: DatasetInfo, device: torch.device | str, settings: dict[str, Any]) -> Self:
        """Build an agent for data with this information, with new weights; its settings are those passed."""
        constructor: Any = cls  # the constructor of each subclass accepts the arguments in its files
        agent: Self = constructor(None, device=device, **settings, _init_setup_model=False)
        agent.dataset_info = info
        agent._setup_model()
        return agent

    def _attach_dataset(self, trajectories: Trajectories, chose_return_scale: bool) -> None:
        """Set the training data of a loaded agent, whose settings stay those of its file.

        Args:
            trajectories: training data.
            chose_return_scale: True if the caller of `load` passed ``return_scale``.

        Raises:
            DatasetError, ValueError: if they do not suit the agent.
        """
        for kind, mismatch in self.dataset_info.space_mismatches(trajectories):
            raise agent_mismatch(trajectories.dataset_ids, kind, mismatch)
        self.policy.check_episodes(trajectories, np.arange(trajectories.episodes))
        self.policy.check_data(trajectories, self.device)
        self._warn_of_data(trajectories)
        features: Any = self.policy.features
        return_scale = None if chose_return_scale else getattr(self, "return_scale", None)
        warn_of_other_scales(self.dataset_info, features.normalization, return_scale, trajectories)
        self.trajectories = trajectories

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "optimizer"], []
