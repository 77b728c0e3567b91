"""Options of an attention layer around its kernel: shared key heads, QK-norm and output gates."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear

QKNorm = Literal["rms", "rms_all_heads", "l2"]
AttentionGate = Literal["elementwise", "headwise"]

INITIAL_SCALE = 10.0
"""Initial scale of "l2", as in Swin Transformer V2 (arXiv:2111.09883): unscaled cosines are too uniform."""


@dataclass(frozen=True)
class AttentionOptions:
    """Options of the projections of an attention layer; they hold for every kernel and position.

    **Grouped queries.** With ``kv_heads`` K < H, the heads share K heads of keys and values: head h reads
    number ``h K // H``. A KV cache is H / K times smaller. K = 1 is multi-query attention.

    **QK-norm.** Queries and keys are normalized before positions change them, which bounds the scores:

    - "rms": ``w x / sqrt(mean(x^2) + eps)`` over the D features of a head, with weights w (D,) for queries
      and for keys that the heads share, as in Qwen3 and ViT-22B;
    - "rms_all_heads": the same over the features of all heads, as in OLMo 2;
    - "l2": ``s_h q . k / (|q| |k|)`` with a learned scale s_h of each head, as in the first paper.

    **Gated attention.** The outputs of the heads are multiplied by ``sigmoid(W x)`` before the output
    projection, where x is the input of the layer's attention at the query: "elementwise" has a number for
    each feature, "headwise" one for each head. Heads can thus give nothing, without attention sinks.

    Source: Shazeer 2019, arXiv:1911.02150; Ainslie et al. 2023, arXiv:2305.13245; Henry et al. 2020,
    arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442; Qiu et al. 2025, arXiv:2505.06708, position G1.

    Args:
        kv_heads: number of heads of keys and values K; None for that of the queries.
        qk_norm: QK-norm; None for none.
        attention_gate: output gate; None for none.
    """

    kv_heads: int | None = None
    qk_norm: QKNorm | None = None
    attention_gate: AttentionGate | None = None


PLAIN = AttentionOptions()
"""Options of plain multi-head attention."""


@dataclass(frozen=True)
class AttentionArguments:
    """Arguments of the constructors of `Attention` and of the modules that replace it.

    Args:
        width: features of a token C.
        heads: number of heads H.
        position: position encoding that enters the scores, a `Position`; None for none.
        kernel: attention kernel, a `Kernel`, which computes the weighted average of the values.
        dropout: probability with which an attention weight is set to 0 in training.
        options: number of key heads, QK-norm and output gate.
    """

    width: int
    heads: int
    position: Any
    kernel: Any
    dropout: float = 0.0
    options: AttentionOptions = PLAIN


class AllHeadsRMSNorm(nn.RMSNorm):
    """RMSNorm of x (B, H, T, D) over the H D features of a token."""

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = super().forward(x.transpose(1, 2).flatten(2))
        return normalized.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


class UnitNorm(nn.Module):
    """Scaling of x (B, H, T, D) to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / |x|``."""
        return F.normalize(x, dim=-1)


class ScaledUnitNorm(UnitNorm):
    """Scaling of queries to length ``scale_h sqrt(D)``: scores ``q . k / sqrt(D)`` are cosines times scale.

    Args:
        heads: number of heads H; ``scale`` has the shape (H,).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((heads,), INITIAL_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.scale[:, None, None] * x.shape[-1] ** 0.5)


QK_NORM_EPS = 1e-6
"""Term under the root of QK-norms, as in the models that use them."""


def build_qk_norms(form: QKNorm | None, size: int, heads: int, kv_heads: int) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries (B, H, T, D) and keys (B, K, T, D); the identity for None.

    Args:
        form: see `AttentionOptions`.
        size: features of a head D.
        heads: heads of queries H.
        kv_heads: heads of keys K.
    """
    if form is None:
        return nn.Identity(), nn.Identity()
    if form == "l2":
        return ScaledUnitNorm(heads), UnitNorm()
    if form == "rms":
        return nn.RMSNorm(size, eps=QK_NORM_EPS), nn.RMSNorm(size, eps=QK_NORM_EPS)
    return AllHeadsRMSNorm(heads * size, eps=QK_NORM_EPS), AllHeadsRMSNorm(kv_heads * size, eps=QK_NORM_EPS)


class OutputGate(nn.Module):
    """Factor of the outputs of the heads, ``sigmoid(W x)``; W has no bias.

    Args:
        form: see `AttentionOptions`.
        width: features of a token C.
        heads: number of heads H.
    """

    def __init__(self, form: AttentionGate, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.linear = orthogonal_linear(width, {"elementwise": width, "headwise": heads}[form], bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply outputs y (B, H, T, D) by the gate of their tokens x (B, T, C)."""
        gate: Tensor = self.linear(x).sigmoid()
        return y * gate.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the heads of x (B, K, ...) for its group of queries: (B, H, ...)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
