"""Scaled dot-product attention by the faster of the forms in torch."""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlxf.utils.matrix_products import products

LONGEST = 512
"""Number of keys up to which products of whole matrices are faster than the fused kernel, with oneDNN."""


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ``softmax(q k^T / sqrt(D) + mask) v``, like ``F.scaled_dot_product_attention``.

    The fused kernel of torch multiplies small blocks, for which a call of oneDNN takes longer than the
    product. Where oneDNN is used, up to `LONGEST` keys, this function multiplies whole matrices instead.

    Args:
        q, k: queries (B, H, Tq, D) and keys (B, H, Tk, D).
        v: values, (B, H, Tk, V).
        mask: terms of the scores, or True for visible pairs; broadcast to (B, H, Tq, Tk). None for all pairs.
    """
    if not products.in_use or k.shape[-2] > LONGEST:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
