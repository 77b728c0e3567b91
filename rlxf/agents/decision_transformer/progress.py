"""Progress bar for training without environments."""

from stable_baselines3.common.callbacks import ProgressBarCallback


class ProgressBar(ProgressBarCallback):
    """Progress bar driven by ``num_timesteps``; SB3's bar needs an environment to count steps."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._start = self.model.num_timesteps

    def _on_step(self) -> bool:
        self.pbar.update(self.model.num_timesteps - self._start - self.pbar.n)
        return True
