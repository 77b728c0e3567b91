"""Tests of errors about agent descriptions in checkpoints: invalid values and unknown settings."""

import pytest

from rlxf.training import CheckpointError
from rlxf.training.compat import VERSION, check_known, checkpoint_errors, checkpoint_errors_unless_overridden


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, TypeError, ValueError])
def test_errors_become_checkpoint_errors(error):
    with pytest.raises(CheckpointError, match=r"cannot build its agent.*width"), checkpoint_errors():
        raise error("width")


def test_checkpoint_errors_propagate_unchanged():
    with pytest.raises(CheckpointError, match=r"^pass policy=Mine$"), checkpoint_errors():
        raise CheckpointError("pass policy=Mine")


def test_unrelated_errors_propagate_unchanged():
    with pytest.raises(ZeroDivisionError), checkpoint_errors():
        raise ZeroDivisionError


def test_errors_propagate_if_the_user_passed_settings():
    with pytest.raises(ValueError, match=r"^gamma$"), checkpoint_errors_unless_overridden({"gamma": 7}):
        raise ValueError("gamma")
    with pytest.raises(CheckpointError, match="gamma"), checkpoint_errors_unless_overridden({}):
        raise ValueError("gamma")


def test_known_settings_pass():
    check_known({"gamma": 1}, ["gamma", "seed"], "9.9")


@pytest.mark.parametrize(("writer", "name"), [("9.9", "rlxf 9.9"), (None, "an unknown version of rlxf")])
def test_unknown_settings_are_reported_with_the_version_of_the_file(writer, name):
    loader = "the version that wrote it" if writer is None else name
    message = (
        f"by {name} and has the settings a, b, which rlxf {VERSION} does not know; load it with {loader}$"
    )
    with pytest.raises(CheckpointError, match=message):
        check_known({"gamma": 1, "b": 2, "a": 3}, ["gamma"], writer)


def test_unknown_setting_of_the_same_version_is_reported_as_altered():
    with pytest.raises(CheckpointError, match="it was altered, or written by other code under the same"):
        check_known({"a": 3}, ["gamma"], VERSION)
