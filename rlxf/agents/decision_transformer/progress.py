"""A progress bar over updates."""

from stable_baselines3.common.callbacks import ProgressBarCallback


class UpdateProgressBar(ProgressBarCallback):
    """SB3's, which counts steps of environments; here there are none, and each call is one update."""

    def _on_step(self) -> bool:
        self.pbar.update(1)
        return True
