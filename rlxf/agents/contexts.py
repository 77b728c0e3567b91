"""Act from several contexts: naive Bayes over what an agent would do after each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rlxf.attention.checks import check_finite_number


@dataclass(frozen=True)
class NBCE:
    r"""``log p(a | c_1 ... c_n) = (1 + beta) log p(a | c_k) - beta log p(a) + const``, k the surest context.

    Contexts are taken to be independent given the action. k has the least entropy; from the second step
    on that of the context before is lowered by eta, so that k seldom jumps. p(a) is what the agent
    does without any context; actions that it would never take are not discounted. Nothing is
    normalised anew.

    Source: Su 2023, "NBCE: naive Bayes extends the context length of language models",
    kexue.fm/archives/9617, and the author's code.

    Args:
        beta: how much what is done anyway is discounted; at least 0.
        eta: bonus of the context before, in nats; at least 0.
        top_p: keep the likeliest actions that hold this much probability, in each context; 1 keeps all.

    Raises:
        TypeError: if one of them is no number.
        ValueError: if beta or eta is negative or not finite, or top_p not in (0, 1].
    """

    paper: ClassVar[str] = "Su 2023, kexue.fm/archives/9617"
    causal: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "n + 1 times the agent's, for n contexts"
    beta: float = 0.25
    eta: float = 0.1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "eta", "top_p"):
            check_finite_number(f"NBCE {name}", getattr(self, name))
        for name in ("beta", "eta"):
            if getattr(self, name) < 0:
                raise ValueError(f"NBCE {name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"NBCE top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor, before: int | None) -> tuple[Tensor, int]:
        """Merge contexts.

        Args:
            logits: (n + 1, A), row 0 without context.
            before: row that was chosen in the step before; None in the first.

        Returns:
            Logits (A,), and the row chosen, 1 ... n.
        """
        log_p = nucleus(logits.log_softmax(dim=-1), self.top_p)
        entropy = -(log_p.exp() * log_p.clamp(min=REMOVED)).sum(dim=-1)
        if before is not None:
            entropy[before] -= self.eta
        chosen = 1 + int(entropy[1:].argmin())
        merged = (1 + self.beta) * log_p[chosen] - self.beta * log_p[0]
        return torch.where(log_p[0] > REMOVED, merged, log_p[chosen]), chosen


WAYS = {NBCE.__name__: NBCE}
"""Name -> class of how contexts are merged: at the output of any agent, so no part of a transformer."""

REMOVED = -100.0
"""Log-probability at and below which an action counts as cut away."""


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits (..., A) with -1e30 for all but the likeliest actions that hold ``top_p`` of the probability."""
    ordered, actions = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    cut = ordered.cumsum(dim=-1) - ordered >= top_p
    return logits.masked_fill(torch.zeros_like(cut).scatter(-1, actions, cut), -1e30)


class Chooser(Protocol):
    """What chooses Discrete actions: the policy of a `GTrXLPPO`, or a `DecisionTransformer`."""

    def choices(self, observation: Any, state: Any, episode_start: Any) -> tuple[Tensor, Any]:
        """Logits (E, A) that `predict` would choose from, and the state after the step."""
        ...

    def took(self, state: Any, actions: Tensor) -> Any:
        """The state after a step in which actions (E,) were taken."""
        ...


@dataclass(frozen=True, eq=False)
class Contexts:
    """What an agent has seen in n contexts.

    Args:
        state: of n + 1 rows, as the agent's `predict` gives it for n + 1 environments; row i holds what
            was seen in context i. Row 0 is emptied at the first step.
        chosen: the row chosen last; None before the first step.
        rows: n + 1.
    """

    state: Any
    rows: int
    chosen: int | None = None


def act_from_contexts(
    agent: Chooser,
    observation: Any,
    contexts: Contexts,
    nbce: NBCE = NBCE(),
    deterministic: bool = True,
) -> tuple[int, Contexts]:
    """One action of one environment, from several contexts; all rows remember the step.

    A Decision Transformer forgets its window at time step 0: its contexts are other pasts of a running
    episode, say, ones that were asked for other returns. An agent that remembers across episodes forgets
    nothing at all: give it a row 0 that has seen nothing.

    Args:
        agent: ``GTrXLPPO(...).policy`` or a `DecisionTransformer`, with Discrete actions.
        observation: one observation, without an axis for environments.
        contexts: what was seen; left as it is.
        nbce: how contexts are merged.
        deterministic: the most likely action instead of a sample.

    Returns:
        The number of the action, from 0 (add the ``start`` of the action space, if it has another), and the
        contexts for the next step.

    Raises:
        TypeError: if actions are not Discrete.
    """
    start = np.arange(contexts.rows) == 0 if contexts.chosen is None else None
    logits, state = agent.choices(repeated(observation, contexts.rows), contexts.state, start)
    merged, chosen = nbce(logits, contexts.chosen)
    action = merged.argmax() if deterministic else torch.distributions.Categorical(logits=merged).sample()
    state = agent.took(state, action.expand(contexts.rows))
    return int(action), Contexts(state, contexts.rows, chosen)


def repeated(observation: Any, rows: int) -> Any:
    """One observation as those of several environments."""
    if isinstance(observation, Mapping):
        return {key: repeated(value, rows) for key, value in observation.items()}
    return np.repeat(np.asarray(observation)[None], rows, axis=0)
