"""Tests of schedules: JSON and text round trips, and placeholders of user-defined schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from rlxf.training import (
    CosineSchedule,
    UnknownSchedule,
    linear,
    parse_schedule,
    schedule_from_json,
    schedule_to_json,
    schedule_to_text,
)
from rlxf.training.strict_json import dump_json, load_json

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
RATES = st.floats(-1e6, 1e6)
SCHEDULES = (
    NUMBERS.map(ConstantSchedule)
    | st.builds(linear, NUMBERS, NUMBERS, st.floats(0.01, 1))
    | NUMBERS.map(FloatSchedule)
    | st.builds(linear, NUMBERS, NUMBERS).map(FloatSchedule)
    | st.builds(CosineSchedule, RATES, RATES)
)


def through_json(value):
    return schedule_from_json(load_json(dump_json(schedule_to_json(value))))


@given(SCHEDULES, st.floats(0, 1))
def test_json_round_trip_of_schedules(schedule, progress):
    assert through_json(schedule)(progress) == schedule(progress)


@given(SCHEDULES | NUMBERS, st.floats(0, 1))
def test_text_round_trip_of_schedules(schedule, progress):
    back = parse_schedule(str(schedule_to_text(schedule)))
    first, second = (FloatSchedule(one)(progress) for one in (schedule, back))
    assert first == second


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (0.2, 0.2),
        (ConstantSchedule(3), 3.0),
        (linear(0.001, 0), "linear:0.001:0.0"),
        (linear(1, 0.5, 0.1), "linear:1.0:0.5:0.1"),
        (CosineSchedule(0.001, 0), "cosine:0.001:0.0"),
        (lambda progress: progress / 2, "custom:0.5"),
    ],
    ids=["number", "constant", "line", "short line", "cosine", "function"],
)
def test_text_of_schedules(schedule, text):
    assert schedule_to_text(schedule) == text


@pytest.mark.parametrize("value", [None, 0.0, 1e-3, 3, np.float32(0.5)])
def test_json_round_trip_of_numbers_and_none(value):
    back = through_json(value)
    assert back == value
    assert type(back) in (float, type(None))


def test_user_defined_schedule_becomes_a_placeholder():
    lost = through_json(lambda progress: 2 * progress)
    assert lost(1) == 2.0
    with pytest.raises(ValueError, match="pass this schedule again"):
        lost(0.999)
    assert isinstance(through_json(FloatSchedule(lost)), UnknownSchedule)


@pytest.mark.parametrize("value", ["1e-3", object(), True, 1j, [1.0]])
def test_non_schedule_is_rejected(value):
    with pytest.raises(TypeError, match="a number or a function"):
        schedule_to_json(value)


@pytest.mark.parametrize(
    "value", [float("nan"), ConstantSchedule(float("inf")), lambda progress: float("nan")]
)
def test_non_finite_schedule_is_rejected(value):
    with pytest.raises(ValueError, match="must be finite, got"):
        schedule_to_json(value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "linear",
        True,
        {"name": "cosine"},
        {"name": ["linear"]},
        {"name": "linear", "start": 1.0},
        {"name": "linear", "start": 1.0, "end": "0", "end_fraction": 1.0},
        {"name": "linear", "start": 1.0, "end": 0.0, "end_fraction": 0.0},
        {"name": "linear", "start": 1.0, "end": 0.0, "end_fraction": "1"},
        {"name": "constant", "value": 1.0, "more": 2},
        {"name": "custom"},
    ],
    ids=str,
)
def test_invalid_description_is_rejected(data):
    with pytest.raises(ValueError, match="does not describe a schedule"):
        schedule_from_json(data)


@given(NUMBERS)
def test_parse_number(number):
    assert parse_schedule(repr(number)) == number


@given(NUMBERS, NUMBERS, st.floats(0, 1))
def test_parse_linear_schedule(start, end, progress):
    schedule = parse_schedule(f"linear:{start}:{end}")
    assert schedule(progress) == LinearSchedule(start, end, 1.0)(progress)
    assert schedule(1.0) == start


@given(RATES, RATES, st.floats(0, 1))
def test_parse_cosine_schedule(start, end, progress):
    schedule = parse_schedule(f"cosine:{start}:{end}")
    assert (schedule(1.0), schedule(0.0)) == pytest.approx((start, end))
    assert schedule(progress) + schedule(1 - progress) == pytest.approx(start + end, abs=1e-6)
    assert schedule(0.75) == pytest.approx(end + (start - end) * (1 + 0.5**0.5) / 2, abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "fast"])
def test_cosine_schedule_rejects_invalid_numbers(value):
    with pytest.raises((TypeError, ValueError), match=r"finite|a number"):
        CosineSchedule(value, 0.0)


def test_linear_schedule_with_end_fraction():
    schedule = parse_schedule("linear:1:0:0.5")
    assert [schedule(progress) for progress in (1.0, 0.75, 0.5, 0.25)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "nan",
        "inf",
        "linear",
        "linear:1",
        "linear:1:a",
        "linear:1:0:0",
        "linear:1:0:1:2",
        "cosine:1",
        "cosine:1:0:1",
        "sine:1:0",
    ],
)
def test_other_text_is_rejected_and_quoted(text):
    with pytest.raises(ValueError, match=r"NUMBER or linear:START:END.*got") as failure:
        parse_schedule(text)
    assert repr(text) in str(failure.value)
