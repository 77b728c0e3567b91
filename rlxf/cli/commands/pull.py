"""``rlxf pull``: download an agent from a repository of the Hugging Face Hub."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from rlxf.cli.options import Command, options
from rlxf.cli.output import print_out


@options
class Pull(Command):
    """Download an agent from a model repository of the Hugging Face Hub, as the folder of a run.

    Only the files that "rlxf push" writes are downloaded, and they are checked before the folder appears.
    The folder is untrusted: without --trust, later commands use registered environments only.
    HF_TOKEN, for private repositories, and HF_ENDPOINT are those of huggingface_hub.

    Example: rlxf pull rlxf/gtrxl-tmaze
    """

    repository: Positional[str]
    """Name of the repository, OWNER/NAME."""
    revision: str | None = None
    """Branch, tag or commit. None means the main branch."""
    output: Path | None = None
    """Folder to create. None means "runs/NAME" with the name of the repository."""

    def prepare(self) -> Callable[[], None]:
        """Look up the repository, and return the download to run."""
        from rlxf.sharing.download import default_folder, find_run
        from rlxf.sharing.hub import check_repository

        check_repository(self.repository)
        path = self.output or default_folder(self.repository)
        if path.exists() or path.is_symlink():
            raise FileExistsError(f"{path} exists; choose another folder with --output")
        remote = find_run(self.repository, self.revision)
        return partial(self._pull, remote, path)

    def _pull(self, remote: object, path: Path) -> None:
        from rlxf.cli.shared_commands import trust_of
        from rlxf.cli.shared_runs import check_shared_run
        from rlxf.sharing.download import RemoteRun, download
        from rlxf.training import RunFolder

        assert isinstance(remote, RemoteRun)
        if remote.ignored_message:
            print_out(remote.ignored_message)
        download(remote, path, check_shared_run)
        print_out(f"{self.repository} at commit {remote.commit[:12]} is written to {path}")
        if trust_of(RunFolder.open(path)):
            print_out(
                f"its environment is not registered here or needs trust: read {path / 'config.json'}, and "
                f"pass --env or --trust to commands on it"
            )
