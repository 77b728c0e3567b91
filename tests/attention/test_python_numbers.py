"""Tests that options accept NumPy scalars and store built-in numbers."""

import json
from dataclasses import dataclass, fields

import numpy as np
import pytest

from rlxf.agents.decision_transformer import HighestValueReturn, SampledReturn
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import (
    KNNLM,
    XL,
    ALiBi,
    BigBird,
    GRUGate,
    HeadPatterns,
    Longformer,
    TransformerSpec,
    Window,
)
from rlxf.data.sampling import ReturnWeighted
from rlxf.off_policy_evaluation import FittedQConfig
from rlxf.utils.checks import PythonNumbers, to_python_number

EIGHT, HALF = np.int64(8), np.float32(0.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int8(-128), -128),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        ((np.int32(1), (np.float16(2), "x")), (1, (2.0, "x"))),
        ([np.int64(3), None], [3, None]),
        (True, True),
    ],
)
def test_numbers_are_converted(value, expected):
    converted = to_python_number(value)
    assert repr(converted) == repr(expected)


@dataclass(frozen=True)
class Base(PythonNumbers):
    """Options without checks."""

    size: int | tuple[int, ...]


@dataclass(frozen=True)
class Checked(Base):
    """Options that are checked after the conversion."""

    rate: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        assert type(self.rate) is float


def test_subclasses_are_converted_before_their_checks():
    assert repr(Base((EIGHT,))) == "Base(size=(8,))"
    assert repr(Checked(EIGHT, HALF)) == "Checked(size=8, rate=0.5)"


@pytest.mark.parametrize(
    ("options", "python"),
    [
        (lambda: XL(EIGHT), lambda: XL(8)),
        (lambda: GRUGate(HALF), lambda: GRUGate(0.5)),
        (lambda: Window(EIGHT), lambda: Window(8)),
        (lambda: Window((EIGHT, np.int32(4))), lambda: Window((8, 4))),
        (lambda: Longformer(EIGHT, global_tokens=np.int64(1)), lambda: Longformer(8, global_tokens=1)),
        (lambda: BigBird(EIGHT, seed=np.int64(3)), lambda: BigBird(8, seed=3)),
        (lambda: KNNLM(k=EIGHT, weight=HALF), lambda: KNNLM(k=8, weight=0.5)),
        (lambda: QRegularized(eta=HALF, n_steps=EIGHT), lambda: QRegularized(eta=0.5, n_steps=8)),
        (lambda: SampledReturn(bins=EIGHT), lambda: SampledReturn(bins=8)),
        (lambda: HighestValueReturn(candidates=EIGHT), lambda: HighestValueReturn(candidates=8)),
        (lambda: ReturnWeighted(HALF), lambda: ReturnWeighted(0.5)),
        (lambda: FittedQConfig(updates=EIGHT, discount=HALF), lambda: FittedQConfig(updates=8, discount=0.5)),
    ],
)
def test_options_store_numbers_of_python(options, python):
    assert repr(options()) == repr(python())


def test_specs_with_numbers_of_numpy_are_json():
    spec = TransformerSpec(
        width=np.int64(16),
        layers=np.int32(2),
        heads=np.uint8(2),
        kv_heads=np.int64(1),
        dropout=np.float32(0.5),
        position=ALiBi(),
        pattern=HeadPatterns(Window(EIGHT), Window(np.int64(4)), np.int64(1)) & Window(EIGHT),
        memory=XL(np.int64(7)),
    )
    assert TransformerSpec.from_json(spec.to_json()) == spec
    assert all(type(getattr(spec, field.name)) in (int, type(None)) for field in fields(spec)[:4])
    assert json.loads(spec.to_json())["width"] == 16


@pytest.mark.parametrize("value", [True, np.True_, np.float64(8), "8", None])
def test_other_values_are_no_whole_numbers(value):
    with pytest.raises(TypeError, match="must be a whole number, got"):
        XL(value)


@pytest.mark.parametrize("value", [True, np.True_, "1", 1j])
def test_other_values_are_no_numbers(value):
    with pytest.raises(TypeError, match="bias must be a number, got"):
        GRUGate(value)


@pytest.mark.parametrize("value", [np.float64("nan"), np.float32("inf"), np.float64(1e300)])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match="bias must be"):
        GRUGate(value)
