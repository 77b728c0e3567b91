"""Fetching a dataset from Minari's server."""

import os
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import minari
from huggingface_hub import constants
from minari.storage.datasets_root_dir import get_dataset_path
from minari.storage.remotes import DEFAULT_REMOTE

from rlxf.envs.trajectories.errors import DatasetError

TIMEOUT = 5.0
"""Seconds to wait for the server's first answer."""


def download(dataset_id: str) -> None:
    """Download a dataset into Minari's folder.

    The server is asked for a sign of life first: without a network Minari itself tries again and again for
    23 seconds before it says so.

    Raises:
        ConnectionError: if the server cannot be reached, or the download breaks off.
        DatasetError: if the server has no such dataset, or none that this version of Minari reads.
    """
    if os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE).startswith("hf://"):
        _check_reachable(dataset_id, constants.ENDPOINT)
    try:
        minari.download_dataset(dataset_id)
    except ValueError as error:
        raise DatasetError(f"dataset {dataset_id} cannot be downloaded: {error}") from error
    except Exception as error:  # the libraries underneath change their classes of errors with each version
        raise ConnectionError(_offline(dataset_id, "the server", error)) from error


def _check_reachable(dataset_id: str, url: str) -> None:
    try:
        urlopen(Request(url, method="HEAD"), timeout=TIMEOUT).close()
    except HTTPError:
        return  # an answer of any kind
    except OSError as error:
        raise ConnectionError(_offline(dataset_id, url, error)) from error


def _offline(dataset_id: str, server: str, error: Exception) -> str:
    return (
        f"cannot download {dataset_id}: {server} gave no answer ({error}). Connect to the network, or copy "
        f"the dataset to {get_dataset_path(dataset_id)}"
    )
