"""Naive Bayes context extension: choose an action from the action distributions of several contexts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rlxf.envs.spaces import map_parts
from rlxf.utils.checks import PythonNumbers, check_between, check_not_negative


@dataclass(frozen=True)
class ContextMerger(PythonNumbers, ABC):
    """Base of the methods that merge the action distributions of several contexts."""

    paper: ClassVar[str] = "Su 2023, kexue.fm/archives/9617"
    causal_form: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "n + 1 times the agent's, for n contexts"

    @abstractmethod
    def __call__(self, logits: Tensor, before: int | None) -> tuple[Tensor, int]:
        """Merge the logits of all contexts.

        Args:
            logits: (n + 1, A), row 0 without context.
            before: second result of the previous step; None in the first step.

        Returns:
            Logits (A,), and the chosen row, 1 ... n; 0 if no single context is chosen.
        """


@dataclass(frozen=True)
class NBCE(ContextMerger):
    r"""``log p(a | c_1 ... c_n) = (1 + beta) log p(a | c_k) - beta log p(a) + const``.

    Contexts are assumed to be independent given the action. c_k is the context with the lowest entropy. From
    the second step on, the entropy of the previously chosen context is lowered by eta, so that k rarely
    changes. p(a) is the distribution without context; actions of probability 0 under it are not discounted.
    The result is not normalized.

    Source: Su 2023, "NBCE: naive Bayes extends the context length of language models",
    kexue.fm/archives/9617, and the author's code.

    Args:
        beta: weight of the distribution without context, which is subtracted; at least 0.
        eta: bonus of the previously chosen context, in nats; at least 0.
        top_p: in each context keep the most likely actions that hold this much probability; 1 keeps all.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if beta or eta is negative or not finite, or top_p is not in (0, 1].
    """

    beta: float = 0.25
    eta: float = 0.1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "eta"):
            check_not_negative(f"NBCE {name}", getattr(self, name))
        check_between("NBCE top_p", self.top_p, 0, 1, inclusive="right")

    def __call__(self, logits: Tensor, before: int | None) -> tuple[Tensor, int]:
        """Merge the logits of all contexts; see `ContextMerger`."""
        log_p = nucleus(logits.log_softmax(dim=-1), self.top_p)
        entropy = -(log_p.exp() * log_p.clamp(min=REMOVED)).sum(dim=-1)
        if before is not None:
            entropy[before] -= self.eta
        chosen = 1 + int(entropy[1:].argmin())
        return discounted(log_p[chosen], log_p[0], self.beta), chosen


@dataclass(frozen=True)
class AverageNBCE(ContextMerger):
    r"""``log p(a | c_1 ... c_n) = (1 + beta) mean_k log p(a | c_k) - beta log p(a) + const``.

    Average pooling: all contexts have the same weight, unlike in `NBCE`, which chooses the most certain one.
    An action of probability 0 in a context is never taken. The result is not normalized.

    Source: Su 2023, "NBCE: naive Bayes extends the context length of language models",
    kexue.fm/archives/9617.

    Args:
        beta: weight of the distribution without context, which is subtracted; at least 0. With ``beta = n -
            1`` the formula is naive Bayes for n contexts.

    Raises:
        TypeError: if beta is not a number.
        ValueError: if beta is negative or not finite.
    """

    beta: float = 0.25

    def __post_init__(self) -> None:
        check_not_negative("AverageNBCE beta", self.beta)

    def __call__(self, logits: Tensor, before: int | None) -> tuple[Tensor, int]:
        """Merge the logits of all contexts; see `ContextMerger`. The second result is 0."""
        log_p = logits.log_softmax(dim=-1)
        return discounted(log_p[1:].mean(dim=0), log_p[0], self.beta), 0


def discounted(log_p: Tensor, without: Tensor, beta: float) -> Tensor:
    """Return ``(1 + beta) log p - beta log p_0``, or log p for actions that are removed from p_0.

    Args:
        log_p: log-probabilities with context, (A,).
        without: log p_0, those without context, (A,).
        beta: weight of p_0.
    """
    return torch.where(without > REMOVED, (1 + beta) * log_p - beta * without, log_p)


CONTEXT_MERGERS: dict[str, type[ContextMerger]] = {one.__name__: one for one in (NBCE, AverageNBCE)}
"""Methods for merging contexts, by name. They act on the output of an agent, not inside a transformer."""

REMOVED = -100.0
"""Log-probability at or below which an action counts as removed."""


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Set logits (..., A) to -1e30 except for the most likely actions that hold ``top_p`` of the mass."""
    ordered, actions = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    cut = ordered.cumsum(dim=-1) - ordered >= top_p
    return logits.masked_fill(torch.zeros_like(cut).scatter(-1, actions, cut), -1e30)


class DiscreteAgent(Protocol):
    """Agent with Discrete actions: the policy of a `GTrXLPPO`, or a `DecisionTransformer`."""

    def action_logits(self, observation: Any, state: Any, episode_start: Any) -> tuple[Tensor, Any]:
        """Return the logits (E, A) from which `predict` chooses, and the state after the step."""
        ...

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        """Return the state after a step in which actions (E,) were taken."""
        ...


@dataclass(frozen=True, eq=False)
class Contexts:
    """Agent states of n contexts.

    Args:
        state: state of n + 1 rows, as the agent's `predict` returns it for n + 1 environments. Row i holds
            context i. Row 0 is cleared at the first step.
        rows: number of rows, n + 1.
        chosen: the row chosen last, or 0 if none was; None before the first step.
    """

    state: Any
    rows: int
    chosen: int | None = None


def act_from_contexts(
    agent: DiscreteAgent,
    observation: Any,
    contexts: Contexts,
    merger: ContextMerger = NBCE(),
    deterministic: bool = True,
) -> tuple[int, Contexts]:
    """Choose an action of one environment from several contexts; the step is added to all rows.

    A Decision Transformer clears its window at time step 0. Its contexts are therefore alternative histories
    of a running episode, e.g. with other target returns. An agent with memory across episodes never clears
    row 0: pass a state whose row 0 is empty.

    Args:
        agent: ``GTrXLPPO(...).policy`` or a `DecisionTransformer`, with Discrete actions.
        observation: one observation, without an axis for environments.
        contexts: states of the contexts; not modified.
        merger: method for merging contexts: `NBCE` or `AverageNBCE`.
        deterministic: take the most likely action instead of a sample. An agent with `SampledReturn` still
            samples its return.

    Returns:
        The number of the action, counted from 0 (add the ``start`` of the action space if it is not 0), and
        the contexts for the next step.

    Raises:
        TypeError: if the action space is not Discrete.
    """
    start = np.arange(contexts.rows) == 0 if contexts.chosen is None else None
    logits, state = agent.action_logits(repeat_observation(observation, contexts.rows), contexts.state, start)
    merged, chosen = merger(logits, contexts.chosen)
    action = merged.argmax() if deterministic else torch.distributions.Categorical(logits=merged).sample()
    state = agent.observe_action(state, action.expand(contexts.rows))
    return int(action), Contexts(state, contexts.rows, chosen)


def repeat_observation(observation: Any, rows: int) -> Any:
    """Repeat one observation along a new first axis, as the observations of several environments."""
    return map_parts(observation, lambda part: np.repeat(np.asarray(part)[None], rows, axis=0))
