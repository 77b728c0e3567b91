"""A progress bar for training without environments."""

from stable_baselines3.common.callbacks import ProgressBarCallback


class ProgressBar(ProgressBarCallback):
    """SB3's asks for environments, to count their steps; this one goes by ``num_timesteps`` alone."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._begun = self.model.num_timesteps

    def _on_step(self) -> bool:
        self.pbar.update(self.model.num_timesteps - self._begun - self.pbar.n)
        return True
