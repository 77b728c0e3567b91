"""Second derivatives of the transformer are right, or refused."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlxf.attention import ACT, KNN, LSH, Compressive, Performer, Reversible, TokenIndex, Transformer
from tests.attention.specs import DEFAULT, SPECS, each, new_model

STEP = 1e-7
REFUSED = r"second derivatives of .* are not available"


def detaches(spec):
    """Return whether gradients leave out a part of the function, so that their differences have more."""
    return isinstance(spec.memory, KNN | Compressive)


def refuses(spec):
    """Return whether the backward pass of short segments recomputes its inputs, without a graph."""
    return isinstance(spec.residual, Reversible) and not isinstance(spec.depth, ACT)


def gradient(model: Transformer, x: Tensor, create_graph: bool = False) -> Tensor:
    """Return the gradient of a smooth function of all outputs with respect to x (B, T, C)."""
    y, _ = model(x, TokenIndex.range(*x.shape[:2]))
    weights = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    return torch.autograd.grad((y * weights).sum(), x, create_graph=create_graph)[0]


@each({name: spec for name, spec in SPECS.items() if not (spec.cross_attention or detaches(spec))})
def test_a_hessian_vector_product_is_that_of_finite_differences_or_refused(spec):
    model = new_model(spec).double().eval()
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 2, 5, spec.width, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        try:
            first = gradient(model, x, create_graph=True)
            refusal = ""
        except RuntimeError as error:
            refusal = str(error)
        assert bool(refusal) == refuses(spec)
        if refusal:
            assert re.search(REFUSED, refusal)
            return
        (product,) = torch.autograd.grad((first * v).sum(), x)
        expected = (gradient(model, x + STEP * v) - gradient(model, x - STEP * v)) / (2 * STEP)
    torch.testing.assert_close((product * v).sum(), (expected * v).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [Performer(), LSH()], ids=repr)
def test_long_segments_without_second_derivatives_are_refused(kernel):
    """A gradient of the gradient with respect to inputs would otherwise lack terms without an error."""
    model, x = replace(DEFAULT, kernel=kernel).build(), torch.ones(1, 600, 8, requires_grad=True)
    gradient(model, x)
    with pytest.raises(RuntimeError, match=f"{REFUSED}.*create_graph=False"):
        gradient(model, x, create_graph=True)
