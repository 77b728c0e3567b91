"""Encoder-decoder transformer."""

from torch import Tensor, nn

from rlxf.attention.cache import Context
from rlxf.attention.spec import TransformerSpec
from rlxf.attention.token_index import TokenIndex


class EncoderDecoder(nn.Module):
    """Encoder-decoder transformer: the decoder attends to the encoder's output.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Args:
        encoder: spec of the encoder, usually with ``causal=False``.
        decoder: spec of the decoder, with ``cross_attention=True``.

    Raises:
        ValueError: if the widths differ, the decoder has no cross-attention, or the encoder has it, or a
            memory that a single segment does not use, such as `XL`.
    """

    def __init__(self, encoder: TransformerSpec, decoder: TransformerSpec):
        super().__init__()
        if encoder.width != decoder.width:
            raise ValueError(
                f"encoder and decoder must have the same width, got {encoder.width} and {decoder.width}"
            )
        if not decoder.cross_attention:
            raise ValueError("the decoder requires cross_attention=True")
        if encoder.cross_attention:
            raise ValueError("the encoder gets no context; set cross_attention=False")
        if encoder.memory is not None and not encoder.memory.affects_one_segment:
            raise ValueError(
                f"the encoder reads the source as one segment, in which memory {encoder.memory} has no "
                f"effect; use memory=None"
            )
        self.encoder = encoder.build()
        self.decoder = decoder.build()

    def forward(
        self, source: Tensor, source_index: TokenIndex, target: Tensor, target_index: TokenIndex
    ) -> Tensor:
        """Encode source (B, N, C) and decode target (B, T, C), each with its index -> (B, T, C)."""
        encoded = self.encoder.outputs(source, source_index)
        return self.decoder.outputs(target, target_index, context=Context(encoded, source_index))
