import numpy as np
import pytest

from rlxf.envs import FaultyEnvironmentError
from rlxf.envs.step_checks import check_finite

GOOD = np.zeros((3, 2, 2), np.float32)


def with_value(value):
    values = GOOD.copy()
    values[1, 0, 1] = value
    return values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda values: values, "observation"),
        (lambda values: {"number": np.arange(3), "image": values}, "observation 'image'"),
        (lambda values: (np.arange(3), values), "observation 1"),
        (lambda values: {"both": (GOOD, values)}, "observation 'both' 1"),
    ],
    ids=["array", "Dict", "Tuple", "nested"],
)
def test_error_has_environment_step_and_index_of_the_first_value(wrap, name, value):
    check_finite("observation", wrap(GOOD), 7)
    with pytest.raises(FaultyEnvironmentError) as fault:
        check_finite("observation", wrap(with_value(value)), 7)
    assert str(fault.value).startswith(
        f"{name} of environment 1 is not finite at its step 7: {value} at index [0, 1];"
    )


def test_error_for_one_number_per_environment_has_no_index():
    with pytest.raises(FaultyEnvironmentError, match=r"environment 2 is .* step 0: nan; correct"):
        check_finite("reward", np.array([0.0, 1.0, np.nan]), 0)


def test_rows_of_a_subset_of_environments():
    with pytest.raises(FaultyEnvironmentError, match="environment 8 is not finite"):
        check_finite("observation", with_value(np.nan), 7, environments=[4, 8, 9])


@pytest.mark.parametrize("values", [np.array([1, 2]), np.array([True]), np.array(["nan"], object)])
def test_values_that_are_not_floats_pass(values):
    check_finite("observation", values, 0)
