"""Sinusoidal positions reproduce the paper's table; Transformer-XL's put the sines first."""

import torch

from rlxf.attention import Sinusoidal, XLRelative
from tests.attention.oracle import close, load

VECTOR = load("sinusoidal")
LENGTH, WIDTH = VECTOR["out_paper"].shape
POSITION = torch.arange(LENGTH)


def test_sine_and_cosine_alternate():
    close(Sinusoidal().encode(POSITION, WIDTH), VECTOR["out_paper"])


def test_embedding_adds_the_encoding():
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    embedding = Sinusoidal().build_embedding(WIDTH, 1)
    close(embedding(x, POSITION.expand(2, -1)), x + VECTOR["out_paper"])


def test_transformer_xl_puts_the_sines_first():
    close(XLRelative().encode(POSITION, WIDTH), VECTOR["out_concat"])
