"""Runner of the programs in README.md and docs/**/*.md, which compares their output with that on the pages.

- A ```text block directly after a program is its output. ``...`` matches any text, as in doctest. With
  ``<!-- numbers vary -->`` between the two blocks, numbers and widths of tables are not compared.
- ``<!-- not run: REASON -->`` before a program excludes it from running. Its commands must still parse, and
  its prints must have an output.
- ``<!-- tested with 2_048 in place of 12_000 -->`` before a program runs it with another number, so that a
  long training is short in the test. Several numbers are separated by commas.
"""

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from rlxf.cli import main
from tests.sources import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n+)?(?P<shorter><!-- tested with [^\n]+ -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
VARY = "<!-- numbers vary -->"
IN_PLACE = re.compile(r"([\d_]+) in place of ([\d_]+)")
NUMBER = re.compile(r"-?\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?")
RUN = re.compile(r"([━─])\1+")
ASSIGNMENT = re.compile(r"\w+=.*")
SHELL = set("|&;<>$`=(")
"""Characters by which a block may need a shell."""


@dataclass(frozen=True)
class Block:
    """Program of a page.

    Args:
        language: "python" or "bash".
        code: the program on the page.
        line: its first line in the page, from 1.
        run: whether it is run.
        output: output on the page; None if there is none.
        vary: whether numbers in the output differ between machines.
        tested: (old, new) numbers that differ in the test.
    """

    language: str
    code: str
    line: int
    run: bool
    output: str | None
    vary: bool
    tested: tuple[tuple[str, str], ...] = ()

    @property
    def shorter(self) -> str:
        """The program with the numbers of the test.

        Raises:
            ValueError: if the program does not contain one of the numbers.
        """
        code = self.code
        for old, new in self.tested:
            if not re.search(rf"\b{old}\b", code):
                raise ValueError(f"the block at line {self.line} does not contain {old}")
            code = re.sub(rf"\b{old}\b", new, code)
        return code

    @property
    def in_place(self) -> str:
        """The program with leading empty lines, so that line numbers in tracebacks are those of the page."""
        return "\n" * (self.line - 1) + self.shorter


def programs(text: str) -> list[Block]:
    """Return the Python and bash blocks of a page, in order."""
    fences = list(FENCE.finditer(text))
    return [
        Block(
            fence["language"],
            fence["code"],
            1 + text.count("\n", 0, fence.start("code")),
            fence["skip"] is None,
            *_output(text, fence, following),
            tuple((old, new) for new, old in IN_PLACE.findall(fence["shorter"] or "")),
        )
        for fence, following in pairwise([*fences, None])
        if fence is not None and fence["language"] in ("python", "bash")
    ]


def _output(text: str, fence: re.Match[str], following: re.Match[str] | None) -> tuple[str | None, bool]:
    """Return the output of a program on the page, and whether its numbers vary."""
    between = None if following is None else text[fence.end() : following.start()].strip()
    if following is None or following["language"] != "text" or between not in ("", VARY):
        return None, False
    return following["code"], between == VARY


def run_page(text: str, page: str) -> dict[str, object]:
    """Run the programs of a page in the current folder, in order, and compare their output.

    Python blocks share one namespace, which is returned. The output of a Python block must be shown on the
    page, that of a bash block may be.

    Raises:
        AssertionError: if an output differs from that of the page, or a bash block fails.
    """
    module = ModuleType("__main__")  # for texts such as f"{__name__}:MyTask"
    caller, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        for block in programs(text):
            if block.run:
                _run_block(block, page, vars(module))
    finally:
        sys.modules["__main__"] = caller
    return vars(module)


def _run_block(block: Block, page: str, namespace: dict[str, object]) -> None:
    if block.language == "python":
        check_output(block, _run_python(block, page, namespace), page)
        return
    printed = _run_bash(block, page)
    if block.output is not None:
        check_output(block, printed, page)


def _run_python(block: Block, page: str, namespace: dict[str, object]) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(block.in_place, page, "exec"), namespace)  # noqa: S102 - our own pages
    return printed.getvalue()


def _run_bash(block: Block, page: str) -> str:
    """Run a bash block with the commands of the environment that runs the tests, and return its output.

    Blocks of plain ``rlxf`` commands run in this process, which has imported everything.
    """
    words = list(commands(block.shorter))
    if all(each[0] == "rlxf" for each in words) and not any(
        SHELL & set(word) for word in bare(block.shorter)
    ):
        status, out, err = _run_commands(words)
    else:
        status, out, err = _run_shell(block.shorter)
    assert status == 0, f"{page}:{block.line} ends with {status}: {err}"
    return out


def _run_commands(words: list[list[str]]) -> tuple[int, str, str]:
    """Run commands of rlxf until one fails; return the exit status and the outputs."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        for each in words:
            try:
                main(each[1:])
            except SystemExit as exit_:
                if exit_.code:
                    return int(exit_.code), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def _run_shell(code: str) -> tuple[int, str, str]:
    """Run a bash program; return the exit status and the outputs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def bare(code: str) -> list[str]:
    """Return the words of a bash program outside of quotation marks and comments."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|(^|\s)#[^\n]*", " ", code).split()


def check_output(block: Block, printed: str, page: str) -> None:
    """Raise AssertionError unless the output equals that of the page, except for trailing spaces."""
    got = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    expected = block.output or ""
    read = shape if block.vary else str
    if doctest.OutputChecker().check_output(read(expected), read(got), doctest.ELLIPSIS):
        return
    shown = f"and the page shows:\n{expected}" if expected else "and the page shows no output"
    raise AssertionError(f"the block at {page}:{block.line} prints:\n{got}{shown}")


def shape(output: str) -> str:
    """Normalize an output: numbers become #, and spaces, newlines and table rules have length one."""
    return " ".join(RUN.sub(r"\1", NUMBER.sub("#", output)).split())


def prints(code: str) -> bool:
    """Return whether a Python program calls print."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(ast.parse(code))
    )


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command of a bash block, without leading variable assignments."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield words
