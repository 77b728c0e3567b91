"""Fused acting step: one token per row in few calls, for transformers whose techniques have such a form."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.attention.attention import LayerStep, StepKeys
from rlxf.attention.cache import KVCache
from rlxf.attention.depth.base import DepthController
from rlxf.attention.linear import (
    FORWARD_HOOKS,
    PatchSearch,
    TokenFunction,
    bound,
    current_matmul_dtype,
    fused_step,
)
from rlxf.attention.positions.base import PositionEmbedding
from rlxf.attention.residuals.base import Residual
from rlxf.attention.token_index import EMPTY, TokenIndex
from rlxf.attention.transformer_layers import TransformerLayers


class FusedStep:
    """`Transformer.step` with a third of its calls: the same results, bit for bit.

    A step of a small transformer takes much longer to call operations than to compute them. This form
    assumes one query per row: tokens are (B, C), masks and distances are computed once for all layers, and
    each layer is one function that holds its parameters. It copies and transforms no weights, so updates of
    the weights need no notification. The parameters are those of the modules at its creation; `is_current`
    returns whether the modules still have the same ones.

    Args:
        layers: each pass.
        output: final norm.
        max_distance: distance in tokens up to which a token attends to the earlier ones of its episode.
        modules: all modules of the transformer.
    """

    def __init__(
        self,
        layers: Sequence[LayerStep],
        output: TokenFunction,
        max_distance: int,
        modules: Sequence[nn.Module],
    ):
        self.layers = layers
        self.output = output
        self.max_distance = max_distance
        held: list[dict[str, Any]] = [x for m in modules for x in (m._modules, m._parameters)]
        self._tables = [table for table in held for _ in table]
        self._names = [name for table in held for name in table]
        self._values = list(chain.from_iterable(table.values() for table in held))
        self._patches = PatchSearch(modules, FORWARD_HOOKS)

    @property
    def is_current(self) -> bool:
        """True if the transformer still has the same modules with the same parameter objects."""
        get: Callable[[dict[str, Any], str], Any] = dict.get
        return all(map(is_, map(get, self._tables, self._names), self._values))

    def accepts(self, cache: KVCache) -> bool:
        """Return whether a step needs no other dtype, no state besides keys, and no patched module.

        A module with hooks of the forward pass, or with a ``forward`` of its own, has to be called.
        """
        kind: Any = type(cache)
        device = cache.index.position.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return False
        plain = _has_plain_buffers(kind) and cache.recurrent is None and cache.context is None
        return plain and current_matmul_dtype() is None and not self._patches.finds_any()

    def __call__(self, x: Tensor, index: TokenIndex, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Compute `Transformer.step`; arguments and results are the same."""
        keys = self._keys(x, index, cache)
        hidden = []
        for layer, buffers in zip(self.layers, cache.layers, strict=True):
            hidden.append(x)
            x = layer(x, buffers, keys)  # type: ignore[arg-type]  # a plain cache has ring buffers only
        return self.output(x), torch.stack(hidden)

    def _keys(self, x: Tensor, index: TokenIndex, cache: KVCache) -> StepKeys:
        """Write the index of the token to the cache, and return the keys that it attends to.

        A token attends to itself, so only an empty slot attends to no key; its mask is arbitrary.
        """
        slot = cache.write(index)
        farthest = len(cache.tables.distances) - 1
        distance = index.position - cache.index.position
        near = distance.clamp(0, self.max_distance)
        visible = (near == distance).logical_and_(cache.index.episode == index.episode)
        columns = farthest - (near if farthest == self.max_distance else near.clamp_(max=farthest))
        mask = torch.where(visible, 0.0, -torch.inf).to(x.dtype)
        return StepKeys(slot, columns[:, None], mask[:, None], index.episode == EMPTY)


class NoFusedStep:
    """Stands for a transformer with a part that has no fused form."""

    is_current = True


def build_fused_step(transformer: TransformerLayers) -> FusedStep | NoFusedStep:
    """Return the fused step of a transformer."""
    pattern, *others = set(transformer.pass_patterns)
    layers = [fused_step(layer) for layer in transformer.pass_layers]
    if others or not pattern.is_uniform_window or None in layers or not _is_plain(transformer):
        return NoFusedStep()
    return FusedStep(layers, bound(transformer.norm), pattern.max_distance, list(transformer.modules()))


def _is_plain(transformer: TransformerLayers) -> bool:
    """Return whether tokens pass through the layers in order, unchanged before and after them."""
    residual_methods = ("run_passes", "init_stream", "attention_input", "output")
    return (
        _keeps(type(transformer.embedding), PositionEmbedding, "forward", "pass_embedding")
        and _keeps(type(transformer.depth), DepthController, "forward", "early_exit")
        and _keeps(type(transformer.spec.residual), Residual, *residual_methods)
    )


@cache
def _has_plain_buffers(kind: type[KVCache]) -> bool:
    """Return whether the keys of a cache of this class are the tokens of its slots."""
    return _keeps(kind, KVCache, "write", "adapt_masks", "observe_input")


def _keeps(kind: type, base: type, *methods: str) -> bool:
    """Return whether a class has the methods of its base class unchanged."""
    return all(getattr(kind, name) is getattr(base, name) for name in methods)
