"""Cross-attention of a decoder to the output of an encoder."""

from dataclasses import dataclass

from torch import Tensor, nn

from rlxf.attention.attention import Attention, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.dropout import Dropout
from rlxf.attention.patterns.full import Full
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import TokenIndex


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens that a decoder reads through cross-attention, usually the output of an encoder.

    A query attends to all context tokens of its own episode.

    Args:
        x: context tokens, (B, N, C).
        index: their positions and episodes, (B, N); episode -1 marks padding.
    """

    x: Tensor
    index: TokenIndex


@dataclass(frozen=True, eq=False)
class ProjectedContext:
    """Projected keys and values (B, H, N, D) of a context, one pair per pass."""

    layers: list[tuple[Tensor, ...]]
    index: TokenIndex

    def mask(self, query: TokenIndex) -> AttentionMask:
        """Return the mask of queries (B, T) over the context."""
        return AttentionMask(query, self.index, Full(), False, self.layers[0][0].dtype)

    def rows(self, rows: Tensor) -> "ProjectedContext":
        """Return the selected rows of the batch."""
        layers = [tuple(part[rows] for part in layer) for layer in self.layers]
        return ProjectedContext(layers, self.index.rows(rows))


class CrossAttention(nn.Module):
    """Cross-attention sublayer of a decoder: norm, attention without positions, and residual."""

    def __init__(self, spec: SpecView):
        super().__init__()
        self.join = spec.residual.build_norm(spec.norm, spec.width, spec.heads)
        self.attention = Attention(spec.width, spec.heads, None, spec.kernel, spec.dropout)
        self.dropout = Dropout(spec.dropout)

    def project(self, context: Tensor) -> Projected:
        """Project keys and values of the context tokens (B, N, C)."""
        return self.attention.project(context)

    def forward(self, x: Tensor, context: Projected, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over the projected context (B, H, N, D) -> (B, T, C)."""
        y = self.attention.cross(self.join.branch_input(x), context, mask)
        return self.join.combine(x, self.dropout(y))


class EncoderDecoder(nn.Module):
    """Encoder-decoder transformer: the decoder attends to the encoder's output.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Args:
        encoder: spec of the encoder, usually with ``causal=False``.
        decoder: spec of the decoder, with ``cross_attention=True``.

    Raises:
        ValueError: if the widths differ, or the decoder has no cross-attention.
    """

    def __init__(self, encoder: SpecView, decoder: SpecView):
        super().__init__()
        if encoder.width != decoder.width:
            raise ValueError(
                f"encoder and decoder must have the same width, got {encoder.width} and {decoder.width}"
            )
        if not decoder.cross_attention:
            raise ValueError("the decoder requires cross_attention=True")
        self.encoder = encoder.build()
        self.decoder = decoder.build()

    def forward(
        self, source: Tensor, source_index: TokenIndex, target: Tensor, target_index: TokenIndex
    ) -> Tensor:
        """Encode source (B, N, C) and decode target (B, T, C), each with its index -> (B, T, C)."""
        encoded = self.encoder.outputs(source, source_index)
        return self.decoder.outputs(target, target_index, context=Context(encoded, source_index))
