"""Tests that the messages on the page of troubleshooting are those of the code."""

import ast
import re
from functools import cache

import pytest

from tests.sources import ROOT, parsed

PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
SHORTEST = 25
"""Minimum number of fixed characters of a text that identifies a message."""


def shown_messages() -> list[str]:
    """Return the messages in the console blocks of the page, one a line."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def shown_fragments() -> list[str]:
    """Return the parts of messages in the first column of the table of the page."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@cache
def texts() -> list[list[str]]:
    """Return the fixed parts of each text and f-string in rlxf, between its values."""
    nodes = [node for tree in parsed("rlxf").values() for node in ast.walk(tree)]
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in nodes]
    constants = [[part.value for part in each if isinstance(part, ast.Constant)] for each in parts]
    return [fixed for fixed in constants if fixed and all(isinstance(part, str) for part in fixed)]


def is_message(line: str) -> bool:
    """Return whether a line contains a text of rlxf, with any values in it."""
    candidates = (
        parts for parts in texts() if sum(map(len, parts)) >= SHORTEST and all(part in line for part in parts)
    )
    return any(re.search(".*".join(map(re.escape, parts)), line) for parts in candidates)


@pytest.mark.parametrize("line", shown_messages())
def test_shown_messages_are_those_of_the_code(line):
    assert is_message(line)


@pytest.mark.parametrize("fragment", shown_fragments())
def test_fragments_of_messages_are_in_the_code(fragment):
    assert any(fragment in part for parts in texts() for part in parts)


def test_there_are_messages_and_fragments():
    assert len(shown_messages()) >= 8
    assert len(shown_fragments()) >= 6


def test_other_messages_are_found():
    assert not is_message("the policy has begun to explore: its entropy is 0.0031 nats")
