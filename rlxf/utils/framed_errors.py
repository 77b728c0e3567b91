"""Error messages of the command line in the frames of tyro, as one line."""

import re

FRAME = re.compile(r"[╭╮╰╯│─]|[+|]?-{3,}[+|]?|^ *\||\| *$", re.MULTILINE)
"""Pattern of the frame of an error message of tyro, also without Unicode."""
TITLE = "Value error"
"""Title of a frame, which is no part of the message."""
HELP = ("For full helptext", "Argument helptext:")
"""Starts of the lines after a message, which refer to the help text."""


def one_line_error(text: str) -> str:
    """Return an error message of the command line in one line, without frames and help text."""
    line = " ".join(FRAME.sub(" ", text).replace("rlxf: ", "").split())
    for end in HELP:
        line = line.partition(end)[0]
    return line.removeprefix(TITLE).strip()


def last_message(text: str) -> str:
    """Return the last line of an output that is no frame, or the message in the frame at its end."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    unframed = [FRAME.sub(" ", line).strip() for line in lines]
    ends_with_frame = bool(lines) and (not unframed[-1] or unframed[-1].startswith(HELP))
    frame = max(text.rfind("╭"), text.rfind(TITLE))
    if ends_with_frame and frame >= 0:
        return one_line_error(text[frame:])
    written = [line for line, content in zip(lines, unframed, strict=True) if content]
    return written[-1].strip("│ ").removeprefix("rlxf: ") if written else ""
