"""Docstrings as Markdown.

Single backticks refer to names of the project; double backticks contain code or a formula.
"""

import re
from collections.abc import Callable
from html import escape

from website.formulas import FormulaError, formula_latex, is_formula

REFERENCE = re.compile(r"(?<!`)`(?P<name>[A-Za-z_][\w.]*)(?P<call>\(\))?`(?!`)")
DOUBLE = re.compile(r"``(?P<code>[^`]+)``")
DISPLAYED = re.compile(r"(?:(?<=\n\n)|\A) {4}(?=``)")
"""Indentation of a formula in its own paragraph."""
PAPER = re.compile(r"(?<!/)(?:arXiv:(\d{4}\.\d{5})|doi:(\S+[^\s,.;:])|(kexue\.fm/archives/\d+))")
SHARED_ENTRY = re.compile(r"^(?P<indent> {4})(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+):", re.MULTILINE)
ENTRY_END = re.compile(r"\n(?! {5})|\Z")


def prepared(text: str, link: Callable[[str], str | None] = lambda name: None) -> str:
    """Return a docstring as Markdown.

    Args:
        text: docstring of rlxf.
        link: function that returns the full name of a reference, or None if it is unknown.
    """
    text = with_papers(DISPLAYED.sub("", split_shared_entries(text)))
    text = DOUBLE.sub(lambda match: code_or_formula(match["code"]), text)

    def refer(match: re.Match[str]) -> str:
        code = f"<code>{escape(match['name'] + (match['call'] or ''))}</code>"
        path = link(match["name"])
        return f'<autoref identifier="{path}" optional>{code}</autoref>' if path else code

    return REFERENCE.sub(refer, text)


def code_or_formula(code: str) -> str:
    """Return the Markdown of the text between double backticks."""
    words = " ".join(code.split())
    if is_formula(words):
        try:
            return rf"\({formula_latex(words)}\)"
        except FormulaError:
            pass
    return f"``{words}``"


def split_shared_entries(text: str) -> str:
    """Return a docstring in which each parameter and exception has its own entry."""
    while match := SHARED_ENTRY.search(text):
        end = ENTRY_END.search(text, match.end())
        assert end is not None
        body = text[match.end() : end.start()]
        entries = [f"{match['indent']}{name}:{body}" for name in match["names"].split(", ")]
        text = text[: match.start()] + "\n".join(entries) + text[end.start() :]
    return text


def with_papers(text: str) -> str:
    """Return Markdown in which the identifiers of papers are links."""
    return PAPER.sub(_paper_link, text)


def _paper_link(match: re.Match[str]) -> str:
    arxiv, doi, blog = match.groups()
    url = f"arxiv.org/abs/{arxiv}" if arxiv else f"doi.org/{doi}" if doi else blog
    return f"[{match[0]}](https://{url})"
