import numpy as np
import pytest

from rlxf.envs import FaultyEnvironmentError
from rlxf.envs.finite import check_finite

GOOD = np.zeros((3, 2, 2), np.float32)


def spoiled(value):
    values = GOOD.copy()
    values[1, 0, 1] = value
    return values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda values: values, "seen"),
        (lambda values: {"number": np.arange(3), "image": values}, "seen 'image'"),
        (lambda values: (np.arange(3), values), "seen 1"),
        (lambda values: {"both": (GOOD, values)}, "seen 'both' 1"),
    ],
    ids=["array", "Dict", "Tuple", "nested"],
)
def test_the_first_value_is_named_with_its_place(wrap, name, value):
    check_finite("seen", wrap(GOOD), 7)
    with pytest.raises(FaultyEnvironmentError) as fault:
        check_finite("seen", wrap(spoiled(value)), 7)
    assert str(fault.value).startswith(
        f"{name} of environment 1 is not finite at its step 7: {value} at index [0, 1];"
    )


def test_a_number_for_each_environment_has_no_index():
    with pytest.raises(FaultyEnvironmentError, match=r"environment 2 is .* step 0: nan; mend"):
        check_finite("reward", np.array([0.0, 1.0, np.nan]), 0)


def test_rows_may_be_some_of_the_environments():
    with pytest.raises(FaultyEnvironmentError, match="environment 8 is not finite"):
        check_finite("seen", spoiled(np.nan), 7, environments=[4, 8, 9])


@pytest.mark.parametrize("values", [np.array([1, 2]), np.array([True]), np.array(["nan"], object)])
def test_what_is_no_float_passes(values):
    check_finite("seen", values, 0)
