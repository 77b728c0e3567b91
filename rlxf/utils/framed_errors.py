"""Error messages of the command line in the frames of tyro, as one line."""

import re

FRAME = re.compile(r"[╭╮╰╯│─]|[+|]?-{3,}[+|]?|^ *\||\| *$", re.MULTILINE)
"""Pattern of the frame of an error message of tyro, also without Unicode."""
TITLE = "Value error"
"""Title of a frame, which is no part of the message."""
FRAMED_END = re.compile(rf"^(╭.*| *{TITLE} *)\n([│╰ ].*\n|\s*\n)*\Z", re.MULTILINE)
"""Pattern of a frame at the end of an output: its title, and lines that all belong to it."""
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
    if framed := FRAMED_END.search(text):
        return one_line_error(framed.group())
    written = [line.strip() for line in text.split("\n") if FRAME.sub(" ", line).strip()]
    return written[-1].strip("│ ").removeprefix("rlxf: ") if written else ""
