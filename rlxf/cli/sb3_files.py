"""The options that name agents of Stable-Baselines3."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv


@dataclass(frozen=True, kw_only=True)
class SB3Files:
    """Agents that Stable-Baselines3 or sb3-contrib saved. Their files hold code, see --sb3.trust."""

    files: tuple[Path, ...] = ()
    """The files, NAME.zip; each agent plays as often as that of a run. Without a run they need --env."""
    trust: bool = False
    """Say that you trust whoever made these files: loading one runs whatever code is in it."""
    normalizers: tuple[Path, ...] = ()
    """The VecNormalize of each file; in the RL Zoo NAME/vecnormalize.pkl. None: it saw raw observations."""
    algorithm: str | None = None
    """Of the files, named as in the RL Zoo, such as ppo or sac; None: they tell."""

    def check(self) -> None:
        """Raise ValueError unless the files are trusted, and all of them normalised or none."""
        if self.files and not self.trust:
            raise ValueError(
                f"{self.files[0]} is not opened: loading a file of Stable-Baselines3 runs whatever code it "
                f"holds. If you trust whoever made it, add --sb3.trust"
            )
        if self.normalizers and len(self.normalizers) != len(self.files):
            raise ValueError(
                f"--sb3.normalizers must be one for each of {len(self.files)} files, or none, got "
                f"{len(self.normalizers)}"
            )

    def agents(self, env: "VecEnv", device: str) -> "list[BaseAlgorithm]":
        """The agents, ready to play in ``env``, raw environments.

        Raises:
            ValueError, OSError, ImportError: as `rlxf.import_sb3`.
        """
        from rlxf.agents.sb3 import import_sb3

        normalizers = self.normalizers or (None,) * len(self.files)
        return [
            import_sb3(
                file, self.trust, env=env, normalizer=normalizer, algorithm=self.algorithm, device=device
            )
            for file, normalizer in zip(self.files, normalizers, strict=True)
        ]
