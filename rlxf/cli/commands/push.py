"""``rlxf push``: upload the agent of a run to a repository of the Hugging Face Hub."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Trust, options
from rlxf.cli.output import print_out

if TYPE_CHECKING:
    from rlxf.training import RunFolder


@options
class Push(Command):
    """Upload the agent of a run to a model repository of the Hugging Face Hub, with a model card.

    The repository is created if it does not exist. It gets config.json, the checkpoint, the statistics of
    normalized observations, the final evaluation, and README.md. Logs and checkpoints of the training stay
    here. HF_TOKEN, a token with write access, and HF_ENDPOINT are those of huggingface_hub.

    Example: rlxf push runs/gtrxl-rlxf-TMaze-v0-0 rlxf/gtrxl-tmaze
    """

    run: Positional[Path]
    """Folder of the run of an agent that acts."""
    repository: Positional[str]
    """Name of the repository, OWNER/NAME."""
    private: bool = False
    """Create a private repository. An existing public repository is then refused."""
    checkpoint: Literal["last", "best"] = "last"
    """Checkpoint to upload, which becomes checkpoint.zip of the repository: the last one, or the best one of
    the evaluations during training."""
    video: bool = False
    """Also upload an animated GIF of one episode, if the environment renders images."""
    trust: Trust = False

    def prepare(self) -> Callable[[], None]:
        """Load the agent, and return the upload to run."""
        from rlxf.cli.shared_runs import load_shared_agent
        from rlxf.sharing.hub import check_repository
        from rlxf.training import RunFolder

        check_repository(self.repository)
        run = RunFolder.open(self.run)
        return partial(self._push, run, load_shared_agent(run, self.checkpoint))

    def _push(self, run: "RunFolder", agent: Any) -> None:
        from rlxf.cli.shared_runs import shared_content
        from rlxf.sharing.download import default_folder
        from rlxf.sharing.upload import upload

        files = shared_content(
            run,
            checkpoint=self.checkpoint,
            agent=agent,
            folder=str(default_folder(self.repository)),
            video=self.video,
            trust=self.trust,
            repository=self.repository,
        )
        url = upload(self.repository, files, self.private)
        print_out(f"{', '.join(sorted(files))} of {run.path} are uploaded to {url}")
