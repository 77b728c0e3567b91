"""RMSNorm and SwiGLU reproduce torch's and Llama's, with their weights."""

import torch

from rlxf.attention import TransformerSpec
from rlxf.attention.feed_forward import build_feed_forward
from rlxf.attention.norm import RMSNorm
from tests.attention.oracle import close, fill, load, put

VECTOR = load("rmsnorm_swiglu")
X = VECTOR["in_x"]
WIDTH = X.shape[-1]
SMALLEST = torch.finfo(torch.float64).eps


def test_rms_norm():
    norm = RMSNorm(WIDTH, float(VECTOR["cfg_eps"])).double()
    put(norm.weight, VECTOR["w_rms"])
    close(norm(X), VECTOR["out_rms"])


def test_rms_norm_of_small_inputs():
    norm = RMSNorm(WIDTH, SMALLEST).double()
    close(norm(X), VECTOR["out_rms_default"])
    close(norm(VECTOR["in_small"]), VECTOR["out_rms_small"])


def test_rms_norm_folds_into_a_projection():
    norm = RMSNorm(WIDTH).double()
    put(norm.weight, VECTOR["w_rms"])
    weight, bias = VECTOR["w_gate"].T, VECTOR["w_gate"].mean(0)
    close(norm.project(X, weight, bias), norm(X) @ weight.T + bias)


def test_swiglu():
    inner = VECTOR["w_gate"].shape[1]
    for chunk in (None, 5):
        module = build_feed_forward(WIDTH, inner, "swiglu", chunk).double()
        fill(module.inner, torch.cat([VECTOR["w_gate"].T, VECTOR["w_up"].T]))
        fill(module.outer, VECTOR["w_down"].T)
        close(module(X), VECTOR["out_swiglu"])


def test_swiglu_has_as_many_parameters_as_the_ungated_network():
    plain, gated = (
        sum(weight.numel() for weight in TransformerSpec(width=96, activation=name).build().parameters())
        for name in ("relu", "swiglu")
    )
    assert abs(plain - gated) < 0.01 * plain


def test_norm_type_is_that_of_all_norms():
    names = {
        type(module).__name__
        for module in TransformerSpec(norm_type="rms_norm").build().modules()
        if "Norm" in type(module).__name__
    }
    assert names == {"PreNorm", "RMSNorm"}
