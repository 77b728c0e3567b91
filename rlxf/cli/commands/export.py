"""``rlxf export``: write the agent of a run as a file that runs without rlxf."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Trust, check_counts, options
from rlxf.cli.output import print_out, report_errors

if TYPE_CHECKING:
    from rlxf.export.formats import Format
    from rlxf.training import RunFolder


@options
class Export(Command):
    """Write the acting step of the agent of a run as a file that runs without rlxf.

    The step maps raw observations and the state of the agent to the most likely actions and the next state.
    It contains the normalization of observations, and the transposition of images, for which the environment
    of the run is made. For ONNX, the folder also gets onnx_player.py, a module that plays the file with
    onnxruntime and numpy alone.

    Example: rlxf export runs/gtrxl-rlxf-TMaze-v0-0 --output policy.onnx
    """

    run: Positional[Path]
    """Folder of the run of a GTrXLPPO or a Decision Transformer."""
    format: Literal["onnx", "torch"] = "onnx"
    """Format of the file: ONNX, or a program of torch.export (.pt2)."""
    output: Path | None = None
    """File to write. None means policy.onnx or policy-torch.pt2 in the folder "export" of the run."""
    checkpoint: Literal["last", "best", "validation"] = "last"
    """Checkpoint to export: the last one, the best one of the evaluations during training, or the one with
    the lowest validation loss."""
    n_envs: int = 1
    """Number of environments in each step."""
    opset: int | None = None
    """ONNX opset, at least 18. None means 20."""
    trust: Trust = False

    def prepare(self) -> Callable[[], None]:
        """Load the agent, and return the export to run."""
        from rlxf.cli.reports import select_checkpoints
        from rlxf.cli.runs import TRANSFORMERS, agent_name
        from rlxf.export.files import check_target
        from rlxf.export.formats import SUFFIXES
        from rlxf.training import RunFolder

        check_counts(self, "n_envs")
        run = RunFolder.open(self.run)
        agent_name(run, TRANSFORMERS)
        (checkpoint,) = select_checkpoints(run, self.checkpoint).values()
        output = self.output
        if output is None:
            stem = "policy" if self.format == "onnx" else f"policy-{self.format}"
            output = run.path / "export" / f"{stem}{SUFFIXES[self.format]}"
        path, format = check_target(output, self.format, self.opset)
        return partial(self._export, self._load(run, checkpoint), path, format)

    def _load(self, run: "RunFolder", checkpoint: Path) -> Any:
        """Load the agent; with the environment of its run if it sees images, for their order of axes."""
        from rlxf.cli.runs import GTRXL, agent_name, load_agent, load_agent_alone, make_env

        if agent_name(run) == GTRXL and _has_images(checkpoint):
            return load_agent(run, make_env(run, None, {}, 1, self.trust), checkpoint, "cpu")
        return load_agent_alone(run, checkpoint, "cpu", self.trust)

    def _export(self, agent: Any, path: Path, format: "Format") -> None:
        with report_errors(ValueError):  # a part of the agent that cannot be exported
            agent.export(path, format, self.n_envs, self.opset)
        print_out(f"the agent is written to {path}, its description to {path.with_suffix('.json').name}")


def _has_images(checkpoint: Path) -> bool:
    """Return whether the observations of a `GTrXLPPO` contain images."""
    from stable_baselines3.common.preprocessing import is_image_space

    from rlxf.agents.gtrxl.checkpoint import read_checkpoint, read_spaces
    from rlxf.data.spaces import leaves

    space, _ = read_spaces(read_checkpoint(checkpoint))
    return any(is_image_space(part) for _, part in leaves(space))
