"""Float32 products of oneDNN: exact, only for large products, and a setting that is always restored."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from rlxf.utils import matrix_products
from rlxf.utils.matrix_products import SMALLEST, float32_products, onednn_is_faster, products

ZEN = {"architecture": "x86_64", "cpu_name": "AMD EPYC", "avx512_f": True, "amx_tile": False}
ROUNDING = 2.0**-8
"""Relative error of an operand in bfloat16."""


@pytest.fixture
def matmul():
    """The setting of torch, which is restored after the test."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("this version of torch has no such setting")
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield torch.backends.mkldnn.matmul
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.fixture
def permitted(matmul, monkeypatch):
    """Let the context change the setting of torch, whatever the processor; yield that setting."""
    monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: True)
    return matmul


@pytest.mark.parametrize(
    "other",
    [{"cpu_name": "Intel(R) Xeon(R)"}, {"amx_tile": True}, {"avx512_f": False}, {"architecture": "aarch64"}],
)
def test_only_processors_with_slow_products_of_mkl_are_accepted(other):
    assert matrix_products._has_slow_mkl(ZEN)
    assert not matrix_products._has_slow_mkl(ZEN | other)
    assert not matrix_products._has_slow_mkl({})


def test_rounded_products_are_detected(matmul, monkeypatch):
    """A library that uses the permission and rounds to bfloat16 is not used."""
    product = torch.Tensor.__matmul__

    def rounded(x, y):
        return product(x.bfloat16().float() if x.dtype == torch.float32 else x, y)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not matrix_products._is_exact()
    assert not products.in_use


def test_products_here_have_the_precision_of_float32():
    """Of forward and backward pass, also with the setting, where this machine uses it."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator, requires_grad=True) for _ in range(2))
    with float32_products(SMALLEST):
        F.linear(x, w).square().sum().backward()
    found = x.grad, w.grad
    x, w = (y.detach().double().requires_grad_() for y in (x, w))
    F.linear(x, w).square().sum().backward()
    for gradient, exact in zip(found, (x.grad, w.grad), strict=True):
        assert (gradient - exact).abs().max() < 1e-2 * ROUNDING * exact.abs().max()


@pytest.mark.parametrize("mode", ["tracing", "autocast", "default device"])
def test_the_first_use_does_not_depend_on_modes_of_torch(monkeypatch, matmul, mode):
    """The decision holds for the whole process, so it must be the same wherever it is made first."""
    monkeypatch.setattr(matrix_products, "_has_slow_mkl", lambda processor: True)
    expected = onednn_is_faster.__wrapped__()
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert onednn_is_faster.__wrapped__() == expected
    elif mode == "default device":
        with torch.device("meta"):
            assert onednn_is_faster.__wrapped__() == expected
    else:
        monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: pytest.fail("decided in a trace"))
        with FakeTensorMode(), float32_products(SMALLEST):
            assert not products.in_use


def test_setting_is_restored_after_an_error(permitted):
    before = permitted.fp32_precision

    def fail():
        with float32_products(SMALLEST):
            assert permitted.fp32_precision == "bf16"
        assert permitted.fp32_precision == "bf16"
        raise KeyError

    with pytest.raises(KeyError), float32_products(SMALLEST):
        fail()
    assert permitted.fp32_precision == before
    assert not products.in_use


@pytest.mark.parametrize(("size", "device"), [(SMALLEST - 1, "cpu"), (SMALLEST, "cuda")])
def test_small_products_and_other_devices_do_not_change_the_setting(permitted, size, device):
    before = permitted.fp32_precision
    with float32_products(size, device):
        assert permitted.fp32_precision == before
        assert not products.in_use


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_precision_of_the_user_is_kept(permitted, precision):
    permitted.fp32_precision = precision
    with float32_products(SMALLEST):
        assert permitted.fp32_precision == precision
        assert not products.in_use
    assert permitted.fp32_precision == precision


def test_precision_that_is_set_in_the_context_is_kept(permitted):
    with float32_products(SMALLEST):
        permitted.fp32_precision = "tf32"
    assert permitted.fp32_precision == "tf32"


def test_setting_is_restored_when_the_last_of_two_threads_leaves(permitted):
    before, entered, leave = permitted.fp32_precision, threading.Event(), threading.Event()

    def other():
        with float32_products(SMALLEST):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with float32_products(SMALLEST):
        thread.start()
        assert entered.wait(10)
    assert permitted.fp32_precision == "bf16"
    assert products.in_use
    leave.set()
    thread.join(10)
    assert permitted.fp32_precision == before
    assert not products.in_use


def test_a_refused_setting_leaves_nothing_behind(monkeypatch):
    class Refusing:
        @property
        def fp32_precision(self):
            return "none"

        @fp32_precision.setter
        def fp32_precision(self, value):
            raise RuntimeError(value)

    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(matmul=Refusing()))
    setting = matrix_products.ProductSetting()
    with pytest.raises(RuntimeError):
        setting.__enter__()
    assert (setting.in_use, setting._users) == (False, 0)


def test_older_versions_of_torch_keep_their_products(monkeypatch):
    monkeypatch.setattr(matrix_products, "_has_slow_mkl", lambda processor: True)
    monkeypatch.setattr(matrix_products, "_is_exact", lambda: True)
    assert onednn_is_faster.__wrapped__() == hasattr(torch.backends.mkldnn, "matmul")
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(is_available=lambda: True))
    assert not onednn_is_faster.__wrapped__()
