"""``rlxf datasets``: what there is to learn from."""

from collections.abc import Callable
from dataclasses import dataclass

from rlxf.cli.dataset_table import show_summaries
from rlxf.cli.screen import show


@dataclass(frozen=True)
class Datasets:
    """List the Minari datasets on this machine, with their steps, episodes and returns.

    They are in the folder MINARI_DATASETS_PATH, else in ~/.minari/datasets. To get one, record it with
    "rlxf collect", or download one of Minari's: "rlxf train dt --dataset ID --download".

    JPEG beside the environment: its images were stored with loss, and differ from what the environment shows.

    Example: rlxf datasets
    """

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        return show_datasets


def show_datasets() -> None:
    """Print a row for each dataset, and below them what is wrong with those that cannot be read."""
    from rlxf.envs.trajectories import DatasetError, local_folder, local_ids, summarize

    summaries, faults = [], []
    for dataset_id in local_ids():
        try:
            summaries.append(summarize(dataset_id))
        except DatasetError as error:
            faults.append(f"{dataset_id} cannot be read: {error}")
    if summaries:
        show_summaries(f"datasets in {local_folder()}", summaries)
    else:
        show(f"no datasets in {local_folder()}; rlxf collect records one, minari download ID fetches one")
    for fault in faults:
        show(fault)
