"""Warnings name the line of the user's program, whatever lies between it and the warning."""

import sysconfig
import warnings
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest

from rlxf.utils.warnings import PACKAGE, warn_user

PACKAGED = f"{PACKAGE}module.py"
LIBRARY = str(Path(sysconfig.get_path("purelib")) / "some_library" / "module.py")
STANDARD = str(Path(sysconfig.get_path("stdlib")) / "contextlib.py")
OTHER = "/programs/callback.py"
WARN = partial(warn_user, "text")


def called_from(files, function):
    """Return a function that calls another one through functions in these files, the innermost first."""
    code = (lambda inner: inner()).__code__
    for file in files:
        function = FunctionType(code.replace(co_filename=file), {}, argdefs=(function,))
    return function


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([PACKAGED], __file__),
        ([PACKAGED, PACKAGED], __file__),
        ([PACKAGED, STANDARD, PACKAGED], __file__),
        ([PACKAGED, LIBRARY], __file__),
        ([PACKAGED, OTHER], OTHER),
        ([PACKAGED, LIBRARY, OTHER, PACKAGED], OTHER),
    ],
)
def test_the_innermost_program_is_named(files, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called_from(files, WARN)()
    assert [(str(each.message), each.category, each.filename) for each in caught] == [
        ("text", UserWarning, named)
    ]


def test_filters_and_categories_apply():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="text"):
            warn_user("text", FutureWarning)
