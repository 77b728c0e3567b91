"""Offline agents that act: their environments for evaluation and callbacks, and their files."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Self

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper

from rlxf.agents.common.environment_checks import check_raw
from rlxf.agents.common.predict_state import MissingStateWarning
from rlxf.agents.offline.algorithm import OfflineAlgorithm
from rlxf.agents.offline.config import OfflineConfig
from rlxf.agents.offline.dataset_info import warn_on_version_mismatch
from rlxf.agents.offline.model import OfflineModel
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.data import DatasetError, ReferenceScores, Trajectories, Windows, check_spaces_match
from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import describe_missing_environment, warn_of_returns
from rlxf.envs.make import make_vec_env_from
from rlxf.envs.return_to_go import ReturnToGo, is_return_conditioned
from rlxf.envs.specs import env_id_of, make_single
from rlxf.utils.checks import check_int


class OfflineAgent(OfflineAlgorithm):
    """`OfflineAlgorithm` whose model acts in the environments of its data.

    Args:
        policy_class: see `OfflineAlgorithm`.
        dataset: see `OfflineAlgorithm`.
        config: see `OfflineAlgorithm`.
        env: environment for callbacks, see `set_env`; None for none.
        download: see `OfflineAlgorithm`.
        trust: use the full description of the environment in the dataset, see `make_env`.
        tensorboard_log: see `OfflineAlgorithm`.
        device: see `OfflineAlgorithm`.

    Attributes:
        trains_in_env: whether a training steps the environment of the agent. If not, it is for callbacks.
    """

    trains_in_env = False

    def __init__(
        self,
        policy_class: type[OfflineModel],
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        config: OfflineConfig,
        env: VecEnv | None,
        download: bool,
        trust: bool,
        tensorboard_log: str | None,
        device: torch.device | str,
        _init_setup_model: bool,
    ):
        self.trust = trust
        self._warned_versions: set[str] = set()  # ids of environments of a different version
        self._missing_state_warning = MissingStateWarning()
        super().__init__(policy_class, dataset, config, download, tensorboard_log, device, _init_setup_model)
        if env is not None:
            self.set_env(env)

    @property
    def return_conditioned(self) -> bool:
        """True if the agent acts for a target return, in environments wrapped in `rlxf.envs.ReturnToGo`."""
        return False

    def make_env(
        self,
        n_envs: int,
        seed: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
        view: Callable[[gymnasium.Env], gymnasium.Env] | None = None,
    ) -> VecEnv:
        """Make the evaluation environments that the dataset names, without the wrapper `ReturnToGo`.

        The environment is looked up by its id in Gymnasium's registry. The rest of the dataset's description
        (entry point, arguments, wrappers) is used if the agent was built or loaded with ``trust=True``.

        Args:
            n_envs: number of environments, at least 1.
            seed: environment i gets seed + i; None for random seeds.
            env_kwargs: arguments of the environment that override those of the dataset.
            view: wrapper around each environment; None for none.

        Raises:
            ValueError: if the dataset names no environment, the environment is not registered, or the
                dataset gives arguments or wrappers that are not trusted; the message names them.
            DatasetError: if the environment's spaces differ from those of the dataset.
            TypeError: if a space is not supported, or the environment does not accept ``env_kwargs``.
        """
        check_int("n_envs", n_envs)
        spec = self._env_spec(env_kwargs or {})
        if spec is None:
            raise self._missing_environment("evaluate(agent, env='CartPole-v1')")
        make = partial(make_single, spec, **(env_kwargs or {}))
        env = make_vec_env_from(make, n_envs, seed, view)
        try:
            self.check_env(env)
        except DatasetError:
            env.close()
            raise
        return env

    def _missing_environment(self, remedy: str) -> ValueError:
        """Return the error for data without an environment, with a call that passes one."""
        return ValueError(
            f"the data of {', '.join(self.dataset_info.dataset_ids)} "
            f"{describe_missing_environment(self._recorded_envs)}: pass one, for example {remedy}"
        )

    def _env_spec(self, given: Collection[str]) -> EnvSpec | None:
        """Return the spec of the evaluation environment; with trust, the dataset's own, which names code."""
        if self.trust and self.trajectories is not None:
            return self.trajectories.eval_env_spec
        return self.dataset_info.env_spec(self.trust, given)

    def check_env(self, env: VecEnv) -> None:
        """Check that the environments have the spaces of the dataset, and return raw observations.

        The wrapper `ReturnToGo` is allowed if the agent is conditioned on a return.

        Raises:
            DatasetError: if a space differs.
            ValueError: if a ``VecNormalize`` normalizes observations, which the agent does itself.

        Warns:
            UserWarning: once, if they are a different version of the dataset's environment.
        """
        check_raw(env, "norm_obs")
        wrapper = unwrap_vec_wrapper(env, ReturnToGo) if self.return_conditioned else None
        unwrapped = env if wrapper is None else wrapper.venv
        check_spaces_match(self.dataset_info, unwrapped.observation_space, unwrapped.action_space)
        self.check_env_id(env_id_of(unwrapped))

    def check_env_id(self, env_id: str | None) -> None:
        """Warn if this is the id of a different version of the dataset's environment.

        Args:
            env_id: Gymnasium id of an environment in which the agent shall act; None if it is unknown.

        Warns:
            UserWarning: once for each id.
        """
        warn_on_version_mismatch(self._recorded_envs, env_id, self._warned_versions)

    @property
    def _recorded_envs(self) -> tuple[str, ...]:
        """Ids of the environments of the training data; without data, of the evaluation environment."""
        recorded = () if self.trajectories is None else self.trajectories.env_ids
        env_id = self.dataset_info.env_id
        return recorded or (() if env_id is None else (env_id,))

    @property
    def return_range(self) -> tuple[float, float]:
        """Smallest and largest return of an episode in the dataset."""
        return self.dataset_info.return_range

    @property
    def reference_scores(self) -> ReferenceScores | None:
        """Scores for the normalization of returns; None if there are none."""
        return self.dataset_info.reference_scores

    def set_env(self, env: VecEnv, force_reset: bool = True) -> None:  # type: ignore[override]
        """Set the environment for callbacks, in `rlxf.envs.ReturnToGo` if the agent needs a target return.

        Raises:
            TypeError: if it is not a VecEnv, or the agent is conditioned on a return and the wrapper is
                missing.
            DatasetError, ValueError: as `check_env`.
        """
        if not isinstance(env, VecEnv):
            raise TypeError(f"{env!r} is not a VecEnv: make one, e.g. rlxf.envs.make_vec_env(id, n_envs)")
        self.check_env(env)
        self.env, self.n_envs = env, env.num_envs

    def _check_eval_callbacks(self, callback: MaybeCallback) -> list[VecEnv]:
        """Check the environments of all `EvalCallback` as `check_env` does, and return them."""
        envs = [each.eval_env for each in find_eval_callbacks(callback)]
        for env in envs:
            self.check_env(env)
        return envs

    def _learn(
        self, update: OfflineUpdate, windows: Windows, steps: int, callback: MaybeCallback, **options: Any
    ) -> Self:
        """Run `OfflineAlgorithm._learn` with an environment set, which SB3's `EvalCallback` needs.

        If the agent has none, it is the environment of the first `EvalCallback`.
        """
        before = self.env
        eval_envs = self._check_eval_callbacks(callback)
        try:
            for env in eval_envs[:1] if before is None else ():
                self.set_env(env)
            return super()._learn(update, windows, steps, callback, **options)
        finally:
            self.env = before

    @classmethod
    def load(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        dataset: Dataset | Sequence[Dataset] | Trajectories | None = None,
        env: VecEnv | None = None,
        device: torch.device | str = "auto",
        sha256: str | None = None,
        **settings: Any,
    ) -> Self:
        """Load an agent that `save` wrote.

        Args:
            path: path of the file; ".zip" is added if it has no suffix.
            dataset: training data; None to predict and evaluate only. With other data than those of the
                file, the agent keeps the normalization of observations and the ``return_scale`` of its first
                data.
            env: as in the constructor.
            device: "auto", "cpu" or "cuda".
            sha256: expected SHA-256 of the file in hexadecimal digits, from a trusted source. It is compared
                before anything is parsed. None to accept any file.
            settings: arguments of the constructor that override the file's. An objective, a sampling or a
                conditioning of your own class must be passed, because a file does not import it. With
                ``seed``, windows are drawn from this seed; without it, further training draws those that
                would have followed. ``trust``, ``download`` and ``tensorboard_log`` are never taken from the
                file. SB3's ``custom_objects`` may contain arguments, too; ``print_system_info`` prints the
                versions of this machine.

        Raises:
            FileNotFoundError: if the file does not exist.
            CheckpointError: if it is truncated, altered or of a different format.
            DatasetError: if the dataset's spaces differ from the checkpoint's.
            ValueError: if the device does not exist.
            TypeError: if the constructor has no such argument.

        Warns:
            UserWarning: about properties of the training data, as in the constructor; if their observations
                or returns have a clearly different scale than those of the first data.
        """
        agent = super().load(path, dataset, device, sha256, **settings)
        if env is not None:
            agent.set_env(env)
        return agent


class TargetReturnAgent(OfflineAgent):
    """`OfflineAgent` that may act for a target return, with the observations of `ReturnToGo`."""

    @property
    def return_conditioned(self) -> bool:
        """True by default, see `OfflineAgent`."""
        return True

    @property
    def allows_equal_returns(self) -> bool:
        """True if the agent is trained on data whose episodes all have the same return, with a warning."""
        return self.return_conditioned

    def _warn_of_data(self, trajectories: Trajectories) -> None:
        super()._warn_of_data(trajectories)
        warn_of_returns(trajectories, self.allows_equal_returns)

    def set_env(self, env: VecEnv, force_reset: bool = True) -> None:  # type: ignore[override]
        """Set the environment for callbacks, wrapped in `rlxf.envs.ReturnToGo` if the agent needs a target.

        Raises:
            TypeError: if it is not a VecEnv with that wrapper.
            DatasetError, ValueError: as `check_env`.
        """
        wrapped = isinstance(env, VecEnv) and is_return_conditioned(env.observation_space)
        if self.return_conditioned and not wrapped:
            raise TypeError(
                f"{env!r} is not a return-conditioned VecEnv: make a VecEnv, e.g. "
                f"rlxf.envs.make_vec_env(id, n_envs), and wrap it, rlxf.envs.ReturnToGo(env, target_return)"
            )
        super().set_env(env, force_reset)


def find_eval_callbacks(callback: Any) -> Iterator[EvalCallback]:
    """Yield each ``EvalCallback`` of SB3 in a callback, a list of callbacks or nested callbacks."""
    if isinstance(callback, EvalCallback):
        yield callback
    inner = callback if isinstance(callback, list) else getattr(callback, "callbacks", ())
    for each in (*inner, getattr(callback, "callback", None)):
        if each is not None:
            yield from find_eval_callbacks(each)
