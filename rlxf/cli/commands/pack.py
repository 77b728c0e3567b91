"""``rlxf pack``: copy the agent of a run into a small folder to share."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Trust, options
from rlxf.cli.output import print_out
from rlxf.utils.files import create_folder

if TYPE_CHECKING:
    from rlxf.training import RunFolder

Content = Path | bytes | Callable[[Path], object]
"""Content of a file: the path of a file to copy, the bytes, or a function that writes the file."""


@options
class Pack(Command):
    """Copy the agent of a run into a small folder to share, with a card.

    The folder has the files that "rlxf push" uploads, but the checkpoint has no state of the optimizer, which
    is two thirds of its size. The evaluation, play, collect and export commands accept it.

    Example: rlxf pack runs/gtrxl-rlxf-TMaze-v0-0 shared/tmaze --checkpoint best
    """

    run: Positional[Path]
    """Folder of the run of an agent that acts."""
    folder: Positional[Path]
    """Folder to create."""
    checkpoint: Literal["last", "best"] = "last"
    """Checkpoint to copy, which becomes checkpoint.zip of the folder: the last one, or the best one of the
    evaluations during training."""
    commit: str | None = None
    """Commit of rlxf that trained the agent, for the card."""
    video: bool = False
    """Also write an animated GIF of one episode, if the environment renders images."""
    trust: Trust = False

    def prepare(self) -> Callable[[], None]:
        """Load the agent, and return the copy to run."""
        from rlxf.cli.shared_runs import load_shared_agent
        from rlxf.training import RunFolder

        if self.folder.exists() or self.folder.is_symlink():
            raise FileExistsError(f"{self.folder} exists; choose another folder")
        run = RunFolder.open(self.run)
        return partial(self._pack, run, load_shared_agent(run, self.checkpoint))

    def _pack(self, run: "RunFolder", agent: Any) -> None:
        from rlxf.agents.common.checkpoint import OPTIMIZER
        from rlxf.cli.shared_runs import shared_content
        from rlxf.utils.run_files import CHECKPOINT

        content = shared_content(
            run,
            checkpoint=self.checkpoint,
            agent=agent,
            folder=self.folder.name if self.folder.is_absolute() else str(self.folder),
            video=self.video,
            trust=self.trust,
            commit=self.commit,
        )
        files: dict[str, Content] = {**content}
        files[CHECKPOINT] = partial(agent.save, exclude=[OPTIMIZER])
        create_folder(self.folder, partial(_write_files, files))
        print_out(f"{', '.join(sorted(files))} of {run.path} are written to {self.folder}")


def _write_files(files: Mapping[str, Content], folder: Path) -> None:
    """Write files by name into a folder."""
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            content(folder / name)
