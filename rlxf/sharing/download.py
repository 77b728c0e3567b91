"""Download of a run from a repository of the Hub into a new run folder.

A repository is untrusted data. Only files of a closed list are requested. Their sizes are limited before
the download and compared after it. The run folder appears only after all files were checked.
"""

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlxf.sharing.hub import HubError, check_repository, client, hub_request, redacted
from rlxf.utils.files import create_folder, not_writable_by_others
from rlxf.utils.run_files import BEST, BEST_NORMALIZER, CHECKPOINT, CONFIG, EVALUATION, NORMALIZER, SHARED

CHECKPOINT_BYTES = 2**30
"""Maximum size of a checkpoint or of statistics."""
TEXT_BYTES = 8 * 2**20
"""Maximum size of a JSON or Markdown file."""
CARD = "README.md"
FILES = {
    CONFIG: TEXT_BYTES,
    CHECKPOINT: CHECKPOINT_BYTES,
    NORMALIZER: CHECKPOINT_BYTES,
    BEST: CHECKPOINT_BYTES,
    BEST_NORMALIZER: CHECKPOINT_BYTES,
    EVALUATION: TEXT_BYTES,
    SHARED: TEXT_BYTES,
    CARD: TEXT_BYTES,
}
"""Names of the files that are downloaded -> their maximum size in bytes."""
REQUIRED = (CONFIG, CHECKPOINT)
VIDEO = "replay.gif"
KNOWN = (".gitattributes", VIDEO)
"""Names of files that are not downloaded, and not mentioned."""
MAX_LISTED = 5
"""Maximum number of ignored files that a message names."""


@dataclass(frozen=True)
class RemoteRun:
    """Run in a repository at one commit.

    Args:
        repository: name of the repository, ``OWNER/NAME``.
        commit: hash of the commit.
        sizes: names of the files to download -> their sizes in bytes, as the Hub announces them.
        ignored: names of the other files.
    """

    repository: str
    commit: str
    sizes: dict[str, int]
    ignored: tuple[str, ...]

    @property
    def ignored_message(self) -> str | None:
        """One line that names the ignored files; None if there is none."""
        if not self.ignored:
            return None
        names = ", ".join(repr(redacted(name)) for name in self.ignored[:MAX_LISTED])
        more = len(self.ignored) - MAX_LISTED
        return f"ignored files of {self.repository}: {names}{f' and {more} more' if more > 0 else ''}"


def default_folder(repository: str) -> Path:
    """Return the folder into which ``rlxf pull`` writes the run of a repository ``OWNER/NAME``."""
    return Path("runs") / repository.partition("/")[2]


def find_run(repository: str, revision: str | None = None) -> RemoteRun:
    """Look up the run in a repository, without a download.

    Args:
        repository: name of a model repository, ``OWNER/NAME``.
        revision: branch, tag or commit; None for the main branch.

    Raises:
        ValueError: if the name of the repository is invalid.
        HubError: if there is no such repository or revision, or no access; if ``config.json`` or
            ``checkpoint.zip`` is missing; or if a file is too large.
        ImportError: if huggingface_hub is not installed.
    """
    check_repository(repository)
    hub = client()
    with hub_request(repository, revision):
        info = hub.model_info(repository, revision=revision, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
        commit = str(info.sha)
    _check_content(repository, sizes, info.library_name)
    used: dict[str, Any] = {name: sizes[name] for name in FILES if name in sizes}
    for name, size in used.items():
        _check_size(repository, name, size)
    return RemoteRun(repository, commit, used, tuple(sorted(set(sizes) - set(FILES) - set(KNOWN))))


def _check_content(repository: str, sizes: dict[str, Any], library: str | None) -> None:
    """Raise HubError if a required file is missing."""
    missing = [name for name in REQUIRED if name not in sizes]
    if missing:
        other = f"; it belongs to the library {redacted(library)!r}" if library not in (None, "rlxf") else ""
        raise HubError(
            f"{repository} is no run of rlxf, as it has no {' and no '.join(missing)}{other}: give a "
            f"repository written by rlxf push"
        )


def _check_size(repository: str, name: str, size: Any) -> None:
    """Raise HubError unless the size of a file is known and not larger than its limit."""
    if not isinstance(size, int) or size < 0:
        raise HubError(f"the Hub gives no size of {name} in {repository}, so it is not downloaded")
    if size > FILES[name]:
        raise HubError(
            f"{name} in {repository} has {size:,} bytes, more than the limit of {FILES[name]:,}: nothing is "
            f"downloaded"
        )


@not_writable_by_others()
def download(remote: RemoteRun, path: Path, check: Callable[[Path], object]) -> None:
    """Download a run into a new folder, which appears after all checks have passed.

    Args:
        remote: the run, from `find_run`.
        path: the run folder to create.
        check: function that raises an error unless the files in the folder are a valid run. It is called
            before the folder appears.

    Raises:
        FileExistsError: if ``path`` exists.
        HubError: if the download fails, a file differs from its announced size, or ``check`` raises
            ValueError, TypeError or an error of missing files. Nothing is left on the disk.
        OSError: if a file cannot be written, e.g. because the disk is full. Nothing is left on the disk.
    """

    def fill(folder: Path) -> None:
        for name in remote.sizes:
            _fetch(remote, name, folder)
        try:
            check(folder)
        except (ValueError, TypeError, FileNotFoundError, NotImplementedError) as error:
            reason = redacted(str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "it"))
            raise HubError(f"{remote.repository} is no valid run: {reason}") from error

    create_folder(path, fill)


def _fetch(remote: RemoteRun, name: str, folder: Path) -> None:
    """Download one file, compare it with its announced size, and move it into the folder."""
    staging = folder / "download"
    with hub_request(remote.repository, remote.commit):
        arrived = client().hf_hub_download(
            remote.repository,
            name,
            revision=remote.commit,
            local_dir=staging,
            cache_dir=staging / "cache",
        )
    status = os.lstat(arrived)
    if not stat.S_ISREG(status.st_mode) or status.st_size != remote.sizes[name]:
        raise HubError(
            f"{name} of {remote.repository} arrived with {status.st_size:,} bytes, and "
            f"{remote.sizes[name]:,} were announced: try again"
        )
    os.replace(arrived, folder / name)
    shutil.rmtree(staging)
