"""``rlxf datasets``: list the Minari datasets on this machine."""

from collections.abc import Callable
from dataclasses import dataclass

from rlxf.cli.dataset_table import show_summaries
from rlxf.cli.output import print_out


@dataclass(frozen=True)
class Datasets:
    """List the Minari datasets on this machine with their steps, episodes and returns.

    Datasets are stored in the folder MINARI_DATASETS_PATH, by default ~/.minari/datasets. Record a dataset
    with "rlxf collect", or download one from Minari with "rlxf train dt --dataset ID --download".

    The mark "(JPEG)" means that images are stored with lossy compression, and differ from those of the
    environment.

    Example: rlxf datasets
    """

    def prepare(self) -> Callable[[], None]:
        """Return `show_datasets`."""
        return show_datasets


def show_datasets() -> None:
    """Print one row per dataset, followed by the errors of datasets that cannot be read."""
    from rlxf.data import DatasetError, local_folder, local_ids, summarize

    summaries, errors = [], []
    for dataset_id in local_ids():
        try:
            summaries.append(summarize(dataset_id))
        except DatasetError as error:
            errors.append(f"{dataset_id} cannot be read: {error}")
    if summaries:
        show_summaries(f"datasets in {local_folder()}", summaries)
    else:
        print_out(f"no datasets in {local_folder()}; record one with rlxf collect, or run minari download ID")
    for error_text in errors:
        print_out(error_text)
