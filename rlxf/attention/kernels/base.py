"""What every kernel offers: a technique, and the module that it builds for a layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.patterns.base import UNLIMITED
from rlxf.attention.patterns.full import Full
from rlxf.attention.technique import Choices, Technique

if TYPE_CHECKING:
    from rlxf.attention.index import Index
    from rlxf.attention.relation import Relation, Share

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``linear(x, weight, bias)``; a layer whose norm is not yet applied to x brings its own."""


class LayerKernel(nn.Module, ABC):
    """A weighted average of values in one layer, linear in them.

    A kernel may read more off a token than its query, key and value: its marks. Those of a query stand
    behind the D features of q, those of a key behind the D features of k, where a cache keeps them too.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: "Relation", dropout: float
    ) -> Tensor:
        """Average the values.

        Args:
            q: queries and their marks, (B, H, Tq, D + E).
            k: keys and their marks, (B, H, Tk, D + F).
            v: values, (B, H, Tk, V); V is D as a rule.
            bias: what positions add to the scaled scores, (B, H, Tq, Tk); None for nothing.
            relation: who may see whom; ``relation.mask`` (B, 1 or H, Tq, Tk) is 0 or -inf.
            dropout: probability with which a weight is set to 0.

        Returns:
            (B, H, Tq, V).
        """

    def query_marks(self, x: Tensor) -> Tensor | None:
        """What is read off the tokens x (B, T, C) that ask: (B, H, T, E), or None for nothing."""
        return None

    def key_marks(self, x: Tensor, linear: Linear = F.linear) -> Tensor | None:
        """What is read off the tokens x (B, T, C) that are looked at: (B, H, T, F), or None for nothing."""
        return None

    def query_notes(self, q: Tensor) -> Tensor | None:
        """What is read off queries q (B, H, T, D) themselves, before positions change them.

        (B, H, T, E), behind the other marks; None for nothing.
        """
        return None

    def key_notes(self, k: Tensor) -> Tensor | None:
        """What is read off projected keys k (B, H, T, D), before positions change them; see `query_notes`."""
        return None

    def meet(self, q: Tensor, k: Tensor, relation: "Relation") -> tuple[Tensor, Tensor]:
        """q and k once more, when all that meet are there and before some are picked.

        What a pair owes to the tokens between the two is found here.
        """
        return q, k

    def look(self, q: Tensor, k: Tensor, bias: Tensor | None, relation: "Relation", dropout: float) -> Tensor:
        """What a query takes of each value, for people to look at, (B, H, Tq, Tk).

        The default is the average of one-hot values, in the dtype of q. Arguments as in `forward`.
        """
        y: Tensor = self(q, k, one_hot(q, k), bias, relation, dropout)
        return y

    def shares(self, relation: "Relation") -> "tuple[Share, ...] | None":
        """The groups of queries that keys are gathered for; None for all pairs at once."""
        return relation.shares

    def share(self, first: "LayerKernel") -> None:
        """Take from the transformer's first kernel what all of them share; by default nothing."""

    @property
    def reach(self) -> int:
        """Beyond this distance, in tokens, no key has any weight: such pairs need not be computed."""
        return UNLIMITED

    def begin_pass(self) -> None:
        """Called before a segment is read with gradient: what was noted for `penalty` is of another one."""

    def penalty(self) -> Tensor | None:
        """What is added to the loss, a scalar; if it depends on the tokens, of the segment read last.

        A layer that a segment goes through several times adds what each time costs.
        """
        return None

    def after_update(self) -> None:
        """Called when the agent has changed the weights and before it acts with them."""

    def skip_update(self) -> None:
        """Called in place of `after_update` when the agent does not learn from what it read."""


class LayerPairwise(LayerKernel):
    """A kernel that computes the weight of each pair of query and key."""

    @abstractmethod
    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: "Relation", dropout: float
    ) -> Tensor:
        """The weights that `forward` averages values with, (B, H, Tq, Tk); arguments as there."""


class LayerMemory(ABC):
    """What a recurrent kernel keeps of an episode's keys and values in one layer; its size is constant."""

    @abstractmethod
    def rows(self, rows: Tensor) -> "LayerMemory":
        """A copy of the chosen rows (N,) int64 of the batch."""


class LayerRecurrent(LayerKernel):
    """A kernel that can act from a `LayerMemory` in place of all keys and values.

    That holds as long as each token sees all of its episode that came before it: patterns forget by position.
    """

    @abstractmethod
    def begin(self, k: Tensor, v: Tensor, index: "Index") -> LayerMemory:
        """What there is to remember of S tokens, oldest first: keys (B, H, S, D + F), values (B, H, S, V)."""

    @abstractmethod
    def recur(self, q: Tensor, k: Tensor, v: Tensor, index: "Index", memory: LayerMemory) -> Tensor:
        """Let the token at index (B, 1) ask, itself included, and remember it: memory is changed in place.

        Args:
            q: its query, (B, H, 1, D + E).
            k: its key, (B, H, 1, D + F), which `meet` has not seen.
            v: its value, (B, H, 1, V).
            index: where it stands. The first token of an episode forgets the one before.
            memory: what `begin` gave.

        Returns:
            (B, H, 1, V); anything for an empty slot, which is not remembered.
        """


class Kernel(Technique, ABC):
    """Base of the kernel techniques: frozen dataclasses that build the module of a layer.

    As every technique, they say for people whose causal form it is, the paper's or ours, and what they
    cost in the length L.
    """

    @abstractmethod
    def build(self, width: int, heads: int) -> LayerKernel:
        """The module of one layer."""

    @property
    def prices_tokens(self) -> bool:
        """Whether the `LayerKernel.penalty` depends on the tokens."""
        return False

    def for_layers(self, layers: int) -> "tuple[Kernel, ...]":
        """The kernel of each layer: by default the same in all.

        Raises:
            ValueError: if its options are for another number of layers.
        """
        return (self,) * layers


class RecurrentKernel(Kernel):
    """A kernel that acts at a constant cost, however long an episode is, where the pattern is `Full`."""

    @abstractmethod
    def build(self, width: int, heads: int) -> LayerRecurrent:
        """See `Kernel`."""


class PairwiseKernel(Kernel):
    """A kernel that takes a bias for each pair of query and key."""

    @abstractmethod
    def build(self, width: int, heads: int) -> LayerPairwise:
        """See `Kernel`."""


def check_whole_sequence(kernel: Kernel, option: str, choices: Choices) -> None:
    """Raise ValueError unless a kernel that cuts up the whole sequence may look at all of it.

    Args:
        kernel: which.
        option: what makes it do so.
        choices: the others.
    """
    if choices.causal:
        raise ValueError(
            f"{kernel} looks at the whole sequence to say who sees whom, and causal=True hides what is "
            f"ahead; set {option}=None"
        )
    if not isinstance(choices.pattern, Full):
        raise ValueError(
            f"{kernel} looks at the whole sequence to say who sees whom, and {choices.pattern} hides a "
            f"part of it; choose Full() or another kernel"
        )


def one_hot(q: Tensor, k: Tensor) -> Tensor:
    """One-hot values (B, H, Tk, Tk) that identify the keys (B, H, Tk, D).

    It has the type of q: keys have a wider one where `LayerKernel.meet` adds logarithms to them.
    """
    return torch.eye(k.shape[2], dtype=q.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
