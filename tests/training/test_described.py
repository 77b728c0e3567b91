"""What a file says of its agent is believed, unless it is wrong or of another version."""

import pytest

from rlxf.training import CheckpointError
from rlxf.training.described import VERSION, blaming_the_file, check_known, described


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, TypeError, ValueError])
def test_what_a_description_has_wrong_is_the_files_fault(error):
    with pytest.raises(CheckpointError, match=r"cannot build its agent.*width"), described():
        raise error("width")


def test_a_reason_that_is_told_already_stays():
    with pytest.raises(CheckpointError, match=r"^pass policy=Mine$"), described():
        raise CheckpointError("pass policy=Mine")


def test_a_bug_is_not_the_files_fault():
    with pytest.raises(ZeroDivisionError), described():
        raise ZeroDivisionError


def test_settings_of_yours_are_not_the_files_fault():
    with pytest.raises(ValueError, match=r"^gamma$"), blaming_the_file({"gamma": 7}):
        raise ValueError("gamma")
    with pytest.raises(CheckpointError, match="gamma"), blaming_the_file({}):
        raise ValueError("gamma")


def test_known_settings_pass():
    check_known({"gamma": 1}, ["gamma", "seed"], "9.9")


@pytest.mark.parametrize(("writer", "told"), [("9.9", "rlxf 9.9"), (None, "an unknown version of rlxf")])
def test_unknown_settings_are_told_with_the_version_that_wrote_them(writer, told):
    loader = "the version that wrote it" if writer is None else told
    message = (
        f"by {told} and has the settings a, b, which rlxf {VERSION} does not know; load it with {loader}$"
    )
    with pytest.raises(CheckpointError, match=message):
        check_known({"gamma": 1, "b": 2, "a": 3}, ["gamma"], writer)


def test_an_unknown_setting_of_this_version_is_no_matter_of_versions():
    with pytest.raises(CheckpointError, match="it was altered, or written by other code under the same"):
        check_known({"a": 3}, ["gamma"], VERSION)
