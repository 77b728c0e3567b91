"""Tests of the limits of TOML files, and of the lines in messages."""

import tracemalloc

import pytest

from rlxf.utils.toml import MAX_PARTS, line_of, loads, read_text

DOCUMENT = """\
seed = 1
core.layers = 2
values = [
    [1, 2],
]

[tasks."v1.2"]  # a comment
env_kwargs = { seed = 3 }
learning-rate = 4

[[runs]]
seed = 5
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("seed", 1),
        ("runs.seed", 12),
        ("core.layers", 2),
        ("core", 2),
        ("core.width", 2),
        ("layers", 2),
        ("values", 3),
        ("tasks", 7),
        ("tasks.v1.2", 7),
        ("v1.2.learning_rate", 9),
        ("learning-rate", 9),
        ("env_kwargs.seed", 8),
        ("tasks.v1.2.env_kwargs.seed", 8),
        ("other", None),
        ("", None),
    ],
)
def test_the_line_of_a_key_is_found(name, line):
    assert line_of(DOCUMENT, name) == line


@pytest.mark.parametrize(
    "text",
    ["a{} = 1", "[a{}]", "x = {{a{} = 1}}", "x = [\n{{a{} = 1}}]", "x = '' # '\na{} = 1", '"\\"="{} = 1'],
)
def test_long_keys_are_refused_at_once(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="has more than 64 parts"):
            loads(text.format(".a" * 10_000))
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["x = '{}'", 'x = "\\"{}"', "x = '''\n{}\n=\n'''", 'x = """\n"{}\\"""=\n"""', "# {} = 1"]
)
def test_dots_in_texts_and_comments_are_no_parts_of_keys(text):
    assert len(loads(text.format("." * 2 * MAX_PARTS))) == ("x" in text)


@pytest.mark.parametrize("text", ["x = " + "[" * 64 + "]" * 64, "x = " + "{a = " * 64 + "1" + "}" * 64])
def test_deep_tables_are_refused(text):
    with pytest.raises(RecursionError, match="nested in more than 64 levels"):
        loads(text)


@pytest.mark.parametrize("part", ['"\\', '"""\\', "'''a", "'", '"', "#", "a.", ".", "[", "{a=", "a \t"])
def test_the_time_of_the_check_is_linear(part):
    """A check of quadratic time would take minutes."""
    with pytest.raises((ValueError, RecursionError)):
        loads(part * (2**18 // len(part)) + "\n=")


def test_a_mark_of_the_byte_order_is_left_out(tmp_path):
    (tmp_path / "file.toml").write_text("a = 1", encoding="utf-8-sig")
    assert read_text(tmp_path / "file.toml", "settings file") == "a = 1"
