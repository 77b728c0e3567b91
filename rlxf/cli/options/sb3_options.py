"""Options for agents saved by Stable-Baselines3."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv


@dataclass(frozen=True, kw_only=True)
class SB3Files:
    """Agents saved by Stable-Baselines3 or sb3-contrib. Their files contain code; see --sb3.trust."""

    files: tuple[Path, ...] = ()
    """Files of agents, NAME.zip. Each agent plays the same number of episodes. They need --env or a run."""
    trust: bool = False
    """Trust the authors of these files. Loading a file executes the code that it contains."""
    normalizers: tuple[Path, ...] = ()
    """VecNormalize file of each agent, e.g. NAME/vecnormalize.pkl of the RL Zoo.
    By default observations are not normalized."""
    algorithm: str | None = None
    """Algorithm of the agents, named as in the RL Zoo, e.g. ppo or sac. None reads it from the files."""

    def check(self) -> None:
        """Raise ValueError if the files are not trusted, or the number of normalizers is wrong."""
        if self.files and not self.trust:
            raise ValueError(
                f"{self.files[0]} is not opened: loading a file of Stable-Baselines3 executes the code that "
                f"it contains. If you trust its author, add --sb3.trust"
            )
        if self.normalizers and len(self.normalizers) != len(self.files):
            raise ValueError(
                f"--sb3.normalizers must name one file for each of {len(self.files)} agents, or none, got "
                f"{len(self.normalizers)}"
            )

    def agents(self, env: "VecEnv", device: str) -> "list[BaseAlgorithm]":
        """Load the agents to act in ``env``, which has raw observations.

        Raises:
            ValueError, OSError, ImportError: as in `rlxf.import_sb3`.
        """
        from rlxf.agents.sb3 import import_sb3

        normalizers = self.normalizers or (None,) * len(self.files)
        return [
            import_sb3(
                file, self.trust, env=env, normalizer=normalizer, algorithm=self.algorithm, device=device
            )
            for file, normalizer in zip(self.files, normalizers, strict=True)
        ]
