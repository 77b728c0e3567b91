"""Building blocks of a layer: linear maps and their precision, dropout, feed-forward networks and norms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
Result = TypeVar("Result")
_dtype: ContextVar[torch.dtype | None] = ContextVar("dtype of matrix products", default=None)


@contextmanager
def matmul_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Compute matrix products with weights in another dtype within this context.

    These are the projections of attention, feed-forward networks and gates. Their results are cast back to
    the dtype of their input, except between the two products of a feed-forward network. Norms, the residual
    stream, scores, softmax, position encodings, all kernels and recurrences are not affected, unlike with
    ``torch.autocast``, which also casts products of scores, states and gates that need more digits. Weights
    and their gradients keep their dtype.

    Args:
        dtype: dtype of matrix products, e.g. ``torch.bfloat16``; None for that of the weights.
    """
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def current_matmul_dtype() -> torch.dtype | None:
    """Return the dtype of `matmul_dtype`; None outside of it."""
    return _dtype.get()


def cast(x: Tensor) -> Tensor:
    """Return an operand of a matrix product in the dtype of `matmul_dtype`; x itself outside of it."""
    dtype = _dtype.get()
    return x if dtype is None else x.to(dtype)


def mixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + b`` in the dtype of `matmul_dtype`, and return it in the dtype of x.

    Args:
        x: (..., C).
        weight: W, (F, C).
        bias: b, (F,); None for none.
    """
    if _dtype.get() is None:
        return F.linear(x, weight, bias)
    return F.linear(cast(x), cast(weight), None if bias is None else cast(bias)).to(x.dtype)


def keep_matmul_dtype(function: Callable[P, Result]) -> Callable[P, Result]:
    """Bind the current `matmul_dtype` to a function that backward calls again, outside of the context."""
    dtype = _dtype.get()

    @wraps(function)
    def with_dtype(*args: P.args, **kwargs: P.kwargs) -> Result:
        with matmul_dtype(dtype):
            return function(*args, **kwargs)

    return function if dtype is None else with_dtype


class Linear(nn.Linear):
    """``nn.Linear`` whose product has the dtype of `matmul_dtype`."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``W x + b`` for x (..., C)."""
        return mixed_linear(x, self.weight, self.bias)

    def bind(self) -> "TokenFunction":
        """Return the product in the dtype of the weights as a `bound` function."""
        return partial(F.linear, weight=self.weight, bias=self.bias)


def stacked_orthogonal(matrices: int, rows: int, columns: int) -> nn.Parameter:
    """Create a parameter (matrices * rows, columns) of stacked matrices, each initialized orthogonally.

    torch's default initialization of Linear scales a projection down by sqrt(3), which weakens the
    signal that gated residuals pass to memory. Orthogonal matrices preserve its norm.
    """
    weight = torch.empty(matrices, rows, columns)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight.flatten(0, 1))


def orthogonal_linear(columns: int, rows: int, matrices: int = 1, bias: bool = True) -> Linear:
    """Create a `Linear` of ``matrices`` stacked projections from ``columns`` to ``rows`` features; bias 0."""
    linear = Linear(columns, matrices * rows, bias=bias)
    linear.weight = stacked_orthogonal(matrices, rows, columns)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


TokenFunction = Callable[..., Tensor]
"""Function of tokens (B, C), such as a module."""


def own_method(part: object, name: str) -> Callable[..., Any] | None:
    """Return a method that the class of ``part`` defines itself; None if it is missing or inherited.

    For faster forms of a computation, which do not apply to a subclass that changes the computation.
    """
    return getattr(part, name) if name in vars(type(part)) else None


def fused_step(part: object) -> Any:
    """Return the form of a module for a `FusedStep`: the result of its own method ``fused_step``, or None."""
    method = own_method(part, "fused_step")
    return None if method is None else method()


def bound(module: nn.Module) -> TokenFunction:
    """Return a function of tokens (B, C) that computes the same as the module, with less overhead per call.

    It uses the current parameter objects of the module and calls no hooks. The class of a module may define
    it in a method ``bind``; otherwise it is the module.
    """
    bind = own_method(module, "bind")
    return module if bind is None else bind()


Item = TypeVar("Item")


class PendingTerms(list[Item]):
    """List of what the last forward keeps for an auxiliary loss; a copy or pickle of it is empty.

    Its tensors belong to the autograd graph of that forward, which cannot be copied.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), ()


PROBABILITY_LEVELS = 2**16
"""Resolution of probabilities on CPU: each entry uses 16 bits, so a 64-bit random number serves four."""


class Dropout(nn.Module):
    """Module form of `dropout`; the identity in evaluation mode.

    Args:
        probability: probability of setting a feature to 0, in [0, 1).
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x of any shape."""
        return dropout(x, self.probability) if self.training else x


def dropout(x: Tensor, probability: float) -> Tensor:
    """Compute ``x m / (1 - p)``, where each entry of m is independently 0 with probability p, else 1.

    Random numbers come from torch's global generator. On CPU torch's own dropout is several times slower:
    it takes as long as a matrix product.

    Source: Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".

    Args:
        x: tensor of any shape.
        probability: p, in [0, 1). On CPU p is rounded to a multiple of 2^-16, both in m and in the scale.
    """
    if not probability:
        return x
    return x * _scales(x, probability) if x.device.type == "cpu" else F.dropout(x, probability)


def _scales(x: Tensor, probability: float) -> Tensor:
    """Sample the factor of each entry of x: 0 or ``1 / (1 - p)``."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(PROBABILITY_LEVELS * probability), PROBABILITY_LEVELS - 1)
    kept = torch.ge(numbers, dropped - PROBABILITY_LEVELS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return kept.mul_(PROBABILITY_LEVELS / (PROBABILITY_LEVELS - dropped))


Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
}
"""Activation functions by name. They may modify their input in place."""


def default_inner_width(width: int, activation: Activation) -> int:
    """Return the hidden features F of a feed-forward sublayer of C features: 4 C, with "swiglu" 8 C / 3.

    A gated sublayer has three matrices instead of two. With 2/3 of the hidden features, rounded down, it has
    the same number of parameters as the ungated one (Shazeer 2020, arXiv:2002.05202, section 3).
    """
    return 8 * width // 3 if activation == "swiglu" else 4 * width


class FeedForward(nn.Module):
    """Position-wise feed-forward network: ``W_2 activation(W_1 x)``, with biases.

    The hidden activations are the largest tensor of a layer, so the bias and a ReLU are applied in place.

    With ``chunk``, tokens are processed in chunks with gradient checkpointing: the hidden activations exist
    for one chunk at a time, and backward recomputes them. The results are the same. Without checkpointing,
    autograd would keep the hidden activations of all chunks.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; GELU: Hendrycks and Gimpel 2016,
    arXiv:1606.08415; chunks: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    Args:
        width: features of a token C.
        inner: hidden features F.
        activation: "relu"; "gelu", as in BERT; or "gelu_tanh", its approximation in GPT-2. For "swiglu" see
            `SwiGLU`.
        chunk: tokens per chunk; None processes all tokens at once.
    """

    inner_matrices = 1

    def __init__(self, width: int, inner: int, activation: Activation, chunk: int | None = None):
        super().__init__()
        self.chunk = chunk
        self.inner = orthogonal_linear(width, inner, self.inner_matrices)
        self.outer = orthogonal_linear(inner, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x (B, T, C), in chunks if they are set -> (B, T, C)."""
        if self.chunk is None or x.shape[1] <= self.chunk:
            return self.transform(x)
        transform = keep_matmul_dtype(self.transform)
        parts = [checkpoint(transform, part, use_reentrant=False) for part in x.split(self.chunk, dim=1)]
        return torch.cat(parts, dim=1)

    def transform(self, x: Tensor) -> Tensor:
        """Apply the network to all tokens at once: x (B, T, C) -> (B, T, C)."""
        hidden = (cast(x.flatten(0, -2)) @ cast(self.inner.weight).T).add_(self.inner.bias)
        y: Tensor = self.outer(self.activation(hidden))
        return y.view_as(x).to(x.dtype)

    def bind(self) -> TokenFunction:
        """Return `transform` as a `bound` function."""
        if type(self.inner) is not Linear:
            return self.transform
        weight, bias, activation = self.inner.weight, self.inner.bias, self.activation
        outer = bound(self.outer)
        return lambda x: outer(activation((x @ weight.T).add_(bias)))


class SwiGLU(FeedForward):
    """Gated feed-forward network: ``W_2 (silu(W_g x) * W_1 x)``, elementwise ``*``, with biases.

    ``inner`` (2 F, C) holds W_g, then W_1. Biases start at 0; the paper has none.

    Arguments are those of `FeedForward`; for ``inner`` see `default_inner_width`.

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """

    inner_matrices = 2

    def transform(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        y: Tensor = self.outer(self.activation(gate) * value)
        return y

    def bind(self) -> TokenFunction:
        return self.transform


def build_feed_forward(width: int, inner: int, activation: Activation, chunk: int | None) -> FeedForward:
    """Build the feed-forward network of an activation. Arguments are those of `FeedForward`."""
    kind = SwiGLU if activation == "swiglu" else FeedForward
    return kind(width, inner, activation, chunk)


NormType = Literal["layer_norm", "rms_norm"]


class LayerNorm(nn.LayerNorm):
    """Layer norm that can be folded into the projection that follows it."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight norm(x) + bias``, with scale and shift of the norm folded into weight and bias."""
        normalized = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return mixed_linear(normalized, weight * self.weight, torch.addmv(bias, weight, self.bias))

    def bind(self) -> TokenFunction:
        """Return the norm as a `bound` function."""
        shape, weight, bias, eps = self.normalized_shape, self.weight, self.bias, self.eps
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)


class RMSNorm(nn.RMSNorm):
    """``w x / sqrt(mean(x^2) + eps)``: it has a scale w only, and does not subtract the mean.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

    Args:
        width: features C.
        eps: 1e-5, as in `LayerNorm`.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight norm(x) + bias``, with the scale of the norm folded into weight."""
        return mixed_linear(F.rms_norm(x, self.normalized_shape, eps=self.eps), weight * self.weight, bias)


NORM_TYPES: dict[NormType, Callable[[int], LayerNorm | RMSNorm]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
}
"""Normalizations by name."""


Norm = Literal["pre", "post"]


class PreNorm(nn.Module):
    """Pre-norm: ``residual(x, f(norm(x)))``. The residual stream itself is never normalized.

    Source: Xiong et al. 2020, arXiv:2002.04745; Parisotto et al. 2020, arXiv:1910.06764, section
    3.1 ("identity map reordering").

    Args:
        width: features of a token C.
        residual: module ``residual(x, y)`` that combines the stream x and the sublayer's output y.
        norm_type: normalization.
    """

    def __init__(self, width: int, residual: nn.Module, norm_type: NormType = "layer_norm"):
        super().__init__()
        self.norm = NORM_TYPES[norm_type](width)
        self.residual = residual

    def branch_input(self, x: Tensor) -> Tensor:
        """Compute the input of the sublayer from the residual stream: (B, T, C) -> (B, T, C)."""
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize the input x (B, T, C) of the sublayer."""
        return self.norm(x)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight normalize(x) + bias`` for an x that needs no gradient.

        Scale and shift of the norm are folded into weight and bias. Their gradients then need no product
        of the size of x, so backward costs as much as forward instead of twice as much.
        """
        return self.norm.project(x, weight, bias)

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine the residual stream x and the sublayer's output y."""
        return self.residual(x, y)

    def bind_around(self, sublayer: TokenFunction) -> TokenFunction:
        """Return the sublayer with its norm and residual connection as a `bound` function of the stream.

        Further arguments are passed to ``sublayer``.
        """
        norm, residual = bound(self.norm), bound(self.residual)
        return lambda x, *inputs: residual(x, sublayer(norm(x), *inputs))


class PostNorm(PreNorm):
    """Post-norm: ``norm(residual(x, f(x)))``, as in the original transformer.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def normalize(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight x + bias``."""
        return mixed_linear(x, weight, bias)

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine stream and sublayer output, then normalize."""
        return self.norm(self.residual(x, y))

    def bind_around(self, sublayer: TokenFunction) -> TokenFunction:
        norm, residual = bound(self.norm), bound(self.residual)
        return lambda x, *inputs: norm(residual(x, sublayer(x, *inputs)))


NORMS: dict[Norm, type[PreNorm]] = {"pre": PreNorm, "post": PostNorm}
"""Places of the norm of a sublayer, by name."""
