"""Upload of a run to a repository of the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlxf.sharing.download import CARD, FILES, VIDEO
from rlxf.sharing.hub import LIBRARY, HubError, check_repository, client, hub_request, redacted

UPLOADED = {*FILES, VIDEO}
"""Names of the files that an upload writes or removes."""


def upload(repository: str, files: Mapping[str, Path | bytes], private: bool = False) -> str:
    """Create a model repository if it does not exist, and replace its run in one commit.

    Files of an earlier run that are not in ``files`` are removed. Other files of the repository are kept.

    Args:
        repository: name of the repository, ``OWNER/NAME``.
        files: names of files in `UPLOADED` -> their path or content.
        private: create a private repository. An existing public repository is then refused.

    Returns:
        Address of the repository.

    Raises:
        ValueError: if the name of the repository is invalid.
        HubError: if the upload fails, there is no permission, or the repository belongs to another library.
        ImportError: if huggingface_hub is not installed.
    """
    check_repository(repository)
    hub = client()
    with hub_request(repository):
        url = hub.create_repo(repository, private=True if private else None, exist_ok=True)
        info = hub.model_info(repository)
    present = {sibling.rfilename for sibling in info.siblings or []}
    _check_replaceable(repository, info, present, private)
    with hub_request(repository):
        hub.create_commit(repository, _operations(files, present), commit_message="Upload an agent of rlxf")
    return redacted(url)


def _check_replaceable(repository: str, info: Any, present: set[str], private: bool) -> None:
    """Raise HubError if the repository is public against the request, or has files of another library."""
    if private and info.private is False:
        raise HubError(
            f"{repository} exists and is public: make it private in its settings, or push without --private"
        )
    occupied = (present & UPLOADED) - {CARD}
    if occupied and info.library_name != LIBRARY:
        raise HubError(
            f"{repository} has a {sorted(occupied)[0]} that rlxf did not write: choose another repository"
        )


def _operations(files: Mapping[str, Path | bytes], present: set[str]) -> list[Any]:
    """Return the operations of the commit: files to add, and files of an earlier run to remove."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    return [*added, *(CommitOperationDelete(name) for name in sorted((present & UPLOADED) - set(files)))]
