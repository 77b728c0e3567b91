"""Base classes of the attention kernels: technique specs and the modules that they build for a layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.patterns.base import UNLIMITED, Pattern
from rlxf.attention.technique import PendingTerms, SpecView, Technique, drop_outdated
from rlxf.utils.errors import CompilationError

if TYPE_CHECKING:
    from rlxf.attention.attention_mask import AttentionMask
    from rlxf.attention.token_index import TokenIndex

LinearFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function ``linear(x, weight, bias)``; a layer that applies its norm together with the projection passes
its own function."""


StepAverage = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of queries (B, H, D), keys and values (B, H, S, D), and the bias (B, H, S) with the mask added.

It returns the weighted averages (B, H D), the heads of a row one after another.
"""


class AttentionKernel(nn.Module, ABC):
    """Attention kernel of one layer: a weighted average of values that is linear in the values.

    A kernel may compute extra features of a token in addition to its query, key and value. The E extra
    features of a query are appended to the D features of q. The F extra features of a key are appended to the
    D features of k, and a KV cache stores them there.
    """

    dropout = 0.0
    """Probability with which a weight is set to 0 in training; `Attention` sets it."""

    penalty_weight = 0.0
    """Factor of the terms of `penalty`."""

    weight_group: Hashable = None
    """Kernels of different layers with the same group share weights; None for separate weights."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty_terms: list[Tensor] = PendingTerms()

    @property
    def has_weights(self) -> bool:
        """True if there are parameters or buffers; `forward` then computes all heads, which they are for."""
        return any(True for tensors in (self.parameters(), self.buffers()) for _ in tensors)

    @property
    def active_dropout(self) -> float:
        """Equal to ``dropout`` in training mode, else 0."""
        return self.dropout if self.training else 0.0

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: "AttentionMask") -> Tensor:
        """Compute the weighted average of the values.

        Args:
            q: queries with their extra features, (B, H, Tq, D + E).
            k: keys with their extra features, (B, H, Tk, D + F).
            v: values, (B, H, Tk, V); V is usually D.
            bias: positional term added to the scaled scores, (B, H, Tq, Tk); None for no bias.
            mask: attention mask and distances; ``mask.mask`` (B, 1 or H, Tq, Tk) is 0 or -inf.

        Returns:
            (B, H, Tq, V).
        """

    def query_extras(self, x: Tensor) -> Tensor | None:
        """Return the extra features of queries for tokens x (B, T, C): (B, H, T, E), or None."""
        return None

    def key_extras(self, x: Tensor, linear: LinearFn = F.linear) -> Tensor | None:
        """Return the extra features of keys for tokens x (B, T, C): (B, H, T, F), or None."""
        return None

    def projected_query_extras(self, q: Tensor) -> Tensor | None:
        """Return extra features computed from projected queries q (B, H, T, D), before positions change them.

        The result (B, H, T, E) is appended after `query_extras`; None for none.
        """
        return None

    def projected_key_extras(self, k: Tensor) -> Tensor | None:
        """Return extra features computed from projected keys k (B, H, T, D); see `projected_query_extras`."""
        return None

    def transform_in_context(self, q: Tensor, k: Tensor, mask: "AttentionMask") -> tuple[Tensor, Tensor]:
        """Transform queries and keys while the full sequence is available.

        It is called before any pair is computed, for dense and sparse attention. Kernels override it if the
        term of a pair depends on the tokens between query and key.
        """
        return q, k

    def inspect_weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: "AttentionMask") -> Tensor:
        """Return the weights of all pairs, (B, H, Tq, Tk), for logs and plots.

        By default they are computed by applying `forward` to one-hot values, in the dtype of q. Kernels that
        average summaries of several tokens override it. Arguments as in `forward`.
        """
        y: Tensor = self(q, k, one_hot(q, k), bias, mask)
        return y

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: "AttentionMask") -> Tensor:
        """Return the weights with which `forward` averages the values, (B, H, Tq, Tk).

        Positions that also change the values need them; see `PairwisePosition`. Arguments as in `forward`; by
        default the result of `inspect_weights`.
        """
        return self.inspect_weights(q, k, bias, mask)

    def fused_step(self) -> StepAverage | None:
        """Return the average of one query per row for a `FusedStep`; None, the default, if there is none."""
        return None

    def allows_gathering(self, mask: "AttentionMask") -> bool:
        """Return whether groups of queries may be computed separately, each with its own gathered keys."""
        return True

    def tie_weights(self, first: "AttentionKernel") -> None:
        """Tie the weights that layers share to ``first``, the first kernel of the same `weight_group`."""

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a key can have weight.

        Pairs farther apart need not be computed.
        """
        return UNLIMITED

    def reset_penalty(self) -> None:
        """Discard the terms of `penalty` from earlier segments; called before each pass."""
        self.penalty_terms = PendingTerms()

    def penalty(self) -> Tensor | None:
        """Return the auxiliary loss, a scalar; None for none.

        By default it is ``penalty_weight`` times the sum of ``penalty_terms`` since the last call. If it
        depends on tokens, it is that of the last segment. A layer that a segment passes several times adds
        one term for each pass.
        """
        terms, self.penalty_terms = self.penalty_terms, PendingTerms()
        return self.penalty_weight * torch.stack(terms).sum() if terms else None

    def after_update(self) -> None:
        """Update buffers after an optimizer step; called before the agent acts with the new weights."""

    def skip_update(self) -> None:
        """Discard statistics of the last pass.

        Called in place of `after_update` when the agent skips the optimizer step.
        """

    def check_capture(self) -> None:
        """Raise CompilationError if a pass cannot be captured; by default for kernels with `skip_update`."""
        if type(self).skip_update is not AttentionKernel.skip_update:
            raise CompilationError(f"{type(self).__name__} keeps statistics of a pass")


class RecurrentKernelState(ABC):
    """Recurrent state of a kernel in one layer: a constant-size summary of an episode's keys and values."""

    @property
    def layout(self) -> str:
        """Name of the class, to compare the layouts of two states."""
        return type(self).__name__

    @abstractmethod
    def rows(self, rows: Tensor) -> "RecurrentKernelState":
        """Return a copy of the selected rows (N,) int64 of the batch."""


class RecurrentAttentionKernel(AttentionKernel):
    """Kernel that can act from a `RecurrentKernelState` in place of all keys and values.

    This is valid as long as each token attends to all earlier tokens of its episode; other patterns hide keys
    by position.
    """

    @abstractmethod
    def prefill(self, k: Tensor, v: Tensor, index: "TokenIndex") -> RecurrentKernelState:
        """Return the recurrent state after S tokens, oldest first.

        Args:
            k: keys, (B, H, S, D + F).
            v: values, (B, H, S, V).
            index: positions and episodes of the tokens, (B, S).
        """

    @abstractmethod
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, index: "TokenIndex", state: RecurrentKernelState
    ) -> Tensor:
        """Compute the output of one token, which attends to itself, and add the token to the state in place.

        Args:
            q: query of the token, (B, H, 1, D + E).
            k: key of the token, (B, H, 1, D + F), before `transform_in_context`.
            v: value of the token, (B, H, 1, V).
            index: position and episode of the token, (B, 1). The first token of an episode resets the state.
            state: state returned by `prefill`.

        Returns:
            (B, H, 1, V); undefined for an empty slot, which is not added to the state.
        """


class Kernel(Technique, ABC):
    """Base of the kernel techniques: frozen dataclasses that build the module of a layer.

    As in every technique, ``causal_form`` says whether the causal form is the paper's or rlxf's, and ``cost``
    is the cost in the length L.

    A subclass that overrides `build` of another kernel does not inherit its `softmax_distance`, which may not
    hold for the new module.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        drop_outdated(cls, Kernel, ["softmax_distance"], frozenset({"build"}))

    @abstractmethod
    def build(self, width: int, heads: int) -> AttentionKernel:
        """Return the module of one layer."""

    def build_part(self, width: int, heads: int, part_heads: int) -> AttentionKernel:
        """Return the module for ``part_heads`` of the ``heads`` heads of one layer.

        Layers that combine two kernels use it.
        """
        return self.build(width // heads * part_heads, part_heads)

    @property
    def replaces_attention(self) -> bool:
        """True if the kernel requires an attention module of its own, see `attention_class`."""
        return type(self).attention_class is not Technique.attention_class

    def check_no_redraw(self) -> None:
        """Raise ValueError if random features are drawn again during training.

        PPO needs fixed ones, because it compares action probabilities before and after an update.
        """

    def score_heads(self, heads: int) -> int:
        """Return the number of heads with attention weights: by default that of the transformer.

        It is a multiple of it; the maps of one head are successive, and share its pattern.
        """
        return heads

    @property
    def token_loss_option(self) -> str | None:
        """Option that scales an `AttentionKernel.penalty` that depends on the tokens; None if none does."""
        return None

    def check_processes(self, count: int) -> None:
        """Raise ValueError if the kernel cannot be trained in this many processes."""

    def check_pairwise(self, position: Technique) -> None:
        """Raise ValueError: this kernel computes no pairs, so a position cannot change their weights."""
        raise ValueError(
            f"{position} changes the weight of each pair of tokens, and {self} computes no pairs; "
            f"choose another position or kernel"
        )

    @property
    def softmax_distance(self) -> int:
        """Distance, in tokens, up to which weights are a softmax of pair scores over all visible keys.

        0 for kernels with other weights or with their own choice of keys.
        """
        return 0

    def is_recurrent(self, pattern: Pattern) -> bool:
        """Return whether a layer with this pattern acts from a `RecurrentKernelState` instead of all keys."""
        return False

    def for_layers(self, layers: int) -> "tuple[Kernel, ...]":
        """Return the kernel of each layer: by default the same in all layers.

        Raises:
            ValueError: if the options are for a different number of layers.
        """
        return (self,) * layers


class RecurrentKernel(Kernel):
    """Kernel with a constant cost per acting step at any episode length, if the pattern is `Full`.

    Its modules are `RecurrentAttentionKernel` modules.
    """

    def is_recurrent(self, pattern: Pattern) -> bool:
        """Return whether every query attends to all earlier tokens."""
        return pattern.allows_all_keys


class PairwiseKernel(Kernel):
    """Kernel that accepts a bias for each pair of query and key.

    Its modules compute the weight of each pair in `AttentionKernel.weights`.
    """

    def check_pairwise(self, position: Technique) -> None:
        """Accept the position."""


def check_key_heads(kernel: Kernel, choices: SpecView) -> None:
    """Raise ValueError if heads share keys, for a kernel with features of the keys of each head."""
    if choices.shares_keys:
        raise ValueError(
            f"{kernel} computes features of the keys for each of {choices.heads} heads, which "
            f"kv_heads={choices.kv_heads} shares among heads; use kv_heads=None or another kernel"
        )


def check_full_pattern(kernel: Kernel, option: str, choices: SpecView) -> None:
    """Raise ValueError unless a kernel that partitions the whole sequence may attend to all of it.

    Args:
        kernel: the kernel.
        option: name of the option that makes it partition the whole sequence.
        choices: the other choices of the transformer.
    """
    if choices.causal:
        raise ValueError(
            f"{kernel} assigns tokens to groups from the whole sequence, and causal=True hides later tokens; "
            f"set {option}=None"
        )
    if not choices.pattern.allows_all_keys:
        raise ValueError(
            f"{kernel} assigns tokens to groups from the whole sequence, and {choices.pattern} hides a part "
            f"of it; choose Full() or another kernel"
        )


def one_hot(q: Tensor, k: Tensor) -> Tensor:
    """Return one-hot values (B, H, Tk, Tk) that identify the keys (B, H, Tk, D).

    They have the dtype of q: keys are wider where `AttentionKernel.transform_in_context` adds logarithms to
    them.
    """
    return torch.eye(k.shape[2], dtype=q.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
