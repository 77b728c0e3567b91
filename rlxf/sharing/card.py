"""Model card of an agent: the README.md of its repository, with the metadata that the Hub reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from rlxf import __version__
from rlxf.sharing.hub import LIBRARY

TASK = "reinforcement-learning"
"""Name of the task in the metadata of the Hub."""


@dataclass(frozen=True)
class Score:
    """Statistics of the episodes of one evaluation.

    Args:
        episodes: number of episodes.
        mean: mean return.
        std: standard deviation of the returns.
        interval: 95% confidence interval of the mean return.
        target: requested return; None for agents that are not conditioned on a return.
    """

    episodes: int
    mean: float
    std: float
    interval: tuple[float, float]
    target: float | None = None

    @property
    def row(self) -> str:
        """Row of a Markdown table."""
        target = "" if self.target is None else f", target return {self.target:g}"
        low, high = self.interval
        return f"| {self.episodes}{target} | {self.mean:.4g} ± {self.std:.2g} | {low:.4g} to {high:.4g} |"


def read_scores(report: Any) -> list[Score]:
    """Return the scores of one checkpoint in ``evaluation.json``: one, or one for each target return.

    Raises:
        ValueError: if a statistic is missing or is not a number.
    """
    try:
        return [_score(each) for each in report.get("targets", [report])]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"evaluation.json is not a report of an evaluation ({error!r}); remove it"
        ) from error


def _score(report: Mapping[str, Any]) -> Score:
    low, high = report["ci"]
    target = report.get("target")
    return Score(
        int(report["episodes"]),
        float(report["mean"]),
        float(report["std"]),
        (float(low), float(high)),
        None if target is None else float(target),
    )


@dataclass(frozen=True)
class ModelCard:
    """Content of a model card.

    Args:
        folder: folder of the run, for the commands of the card.
        agent: name of the class of the agent.
        env: id of the environment; None if it is unknown.
        progress: steps or updates of the training, e.g. "200,000 steps".
        checkpoint: checkpoint that is shared: "last" or "best".
        scores: scores of this checkpoint; empty if it was not evaluated.
        command: command that trains the agent; None if it is unknown.
        datasets: ids of the Minari datasets that it was trained on.
        make_env: Python expression that makes a vector environment of ``agent``; None if there is none.
        normalizer: whether the agent is shared with statistics of its observations, ``normalizer.zip``.
        target: return to request from the agent; None if it is not conditioned on a return.
        trust: ``" --trust"`` if commands on the run need it, else empty.
        video: whether the agent is shared with a video.
        repository: name of the repository, ``OWNER/NAME``, from which ``rlxf pull`` downloads the folder;
            None if the folder is shared in another way.
        commit: commit of rlxf that trained the agent; None if it is unknown.
        teacher: folder of the teacher's run; None if the agent was not distilled.
    """

    folder: str
    agent: str
    env: str | None
    progress: str
    checkpoint: str
    scores: list[Score]
    command: str | None
    datasets: tuple[str, ...] = ()
    make_env: str | None = None
    normalizer: bool = False
    target: float | None = None
    trust: str = ""
    video: bool = False
    repository: str | None = None
    commit: str | None = None
    teacher: str | None = None

    def text(self) -> str:
        """Return the text of the card: for a repository the YAML header of the Hub, then Markdown."""
        parts = [self._title(), self._evaluation(), self._training(), self._usage()]
        header = "" if self.repository is None else f"---\n{self._header()}\n---\n\n"
        return header + "\n\n".join(filter(None, parts)) + "\n"

    def _header(self) -> str:
        from huggingface_hub import ModelCardData

        environment = [] if self.env is None else [self.env]
        results = self._results() if self.scores else None
        data = ModelCardData(
            library_name=LIBRARY,
            tags=[TASK, "deep-reinforcement-learning", LIBRARY, *environment],
            model_name=self.agent if results else None,
            eval_results=results,
        )
        return data.to_yaml().strip()

    def _results(self) -> list[Any]:
        from huggingface_hub import EvalResult

        best = max(self.scores, key=lambda score: score.mean)
        env = self.env or "unknown"
        return [
            EvalResult(
                task_type=TASK,
                task_name=TASK,
                dataset_type=env,
                dataset_name=env,
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=f"{best.mean:.2f} +/- {best.std:.2f}",
                verified=False,
            )
        ]

    def _title(self) -> str:
        task = "an unknown environment" if self.env is None else f"`{self.env}`"
        data = f" on the Minari datasets {', '.join(f'`{name}`' for name in self.datasets)}" * bool(
            self.datasets
        )
        commit = "" if self.commit is None else f" (commit {self.commit})"
        video = "\n\n![One episode](replay.gif)" if self.video else ""
        return (
            f"# {self.agent} on {self.env or self.folder}\n\n"
            f"A `{self.agent}` of rlxf {__version__}{commit} for {task}, trained for {self.progress}{data}. "
            f"`checkpoint.zip` is the {self.checkpoint} checkpoint of its run.{video}"
        )

    def _evaluation(self) -> str:
        if not self.scores:
            return f"## Evaluation\n\nThe agent was not evaluated. Evaluate it with `{self._evaluate}`."
        head = "| episodes | return (mean ± standard deviation) | 95% interval of the mean |\n|---|---|---|"
        return "\n".join(["## Evaluation\n", head, *(score.row for score in self.scores)])

    def _training(self) -> str:
        command = f"```bash\n{self.command}\n```"
        if self.command is None:
            command = "The command of the training is unknown; `config.json` has its settings."
        student = f"The agent is a student, distilled from the agent of the run `{self.teacher}`."
        return "\n\n".join(["## Training", *([] if self.teacher is None else [student]), command])

    @property
    def _evaluate(self) -> str:
        return f"rlxf evaluate {quote(self.folder)}{self._options}"

    @property
    def _options(self) -> str:
        """Options of commands on the run: of its environment, if that is unknown, and of trust."""
        return f"{' --env ID' * (self.env is None)}{self.trust}"

    def _usage(self) -> str:
        trust = (
            "\n\nThe environment is that of a module, or has arguments. `--trust` uses these parts of the "
            "run, which can run code: pass it only if you trust the author. The program uses them without it."
        )
        download = [] if self.repository is None else [f"rlxf pull {self.repository}"]
        commands = "\n".join([*download, self._evaluate, f"rlxf play {quote(self.folder)}{self._options}"])
        blocks = f"```bash\n{commands}\n```\n\n```python\n{self._program()}\n```"
        return f"## Usage\n\n{blocks}{trust * bool(self.trust)}"

    def _program(self) -> str:
        """Return a program in which the agent acts; without its environment, it only loads the agent."""
        load = f"agent = {self.agent}.load({self._path('checkpoint.zip')})"
        if self.make_env is None:
            return f"from rlxf import {self.agent}\n\n{load}"
        environment = self._environment
        names = [name for name in ("ReturnToGo", "make_vec_env") if name in environment]
        lines = [
            "import numpy as np\n",
            f"from rlxf import {self.agent}",
            *([f"from rlxf.envs import {', '.join(names)}"] if names else []),
            *(["from rlxf.training import load_normalizer"] if self.normalizer else []),
            "",
            load,
            environment,
            "obs, state, start = env.reset(), None, np.ones(1, bool)",
            "for _ in range(1000):",
            "    actions, state = agent.predict(obs, state, start, deterministic=True)",
            "    obs, rewards, start, infos = env.step(actions)",
        ]
        return "\n".join(lines)

    @property
    def _environment(self) -> str:
        """Lines of the program that make the environment, with the wrappers of the agent."""
        lines = [f"env = {self.make_env}"]
        if self.normalizer:
            lines += [f"env = load_normalizer({self._path('normalizer.zip')}, env)"]
            lines += ["env.training = env.norm_reward = False"]
        if self.target is not None:
            lines += [f"env = ReturnToGo(env, target_return={self.target!r})"]
        return "\n".join(lines)

    def _path(self, name: str) -> str:
        return json.dumps(f"{self.folder}/{name}", ensure_ascii=False)
