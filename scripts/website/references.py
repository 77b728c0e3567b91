"""Links from names in the text of pages to their entries in the API reference."""

import re

from website import api

SKIPPED = re.compile(r"(<(a|pre|h\d|autoref)\b.*?</\2>)", re.DOTALL)
CODE = re.compile(r"<code>(?P<name>[A-Za-z_]\w*)</code>")


def with_references(html: str) -> str:
    """Return HTML in which the first mention of each class or function of the API is a link.

    Functions whose name is one word, such as `collect`, are not linked: commands and arguments have these
    names, too.
    """
    linked: set[str] = set()

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        target = api.short_names().get(name)
        if target is None or name in linked or not (name[0].isupper() or "_" in name):
            return match[0]
        linked.add(name)
        return f'<autoref identifier="{target}" optional>{match[0]}</autoref>'

    parts = SKIPPED.split(html)
    return "".join(
        CODE.sub(link, part) if number % 3 == 0 else part
        for number, part in enumerate(parts)
        if number % 3 != 2
    )
