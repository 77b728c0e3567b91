"""Check of the SHA-256 of a whole file, which its reader obtained separately."""

import hashlib
import re
from io import BufferedReader

DIGITS = re.compile("[0-9a-fA-F]{64}")


def check_digits(sha256: str | None) -> None:
    """Raise ValueError unless this is a SHA-256 in hexadecimal digits, or None."""
    if sha256 is not None and not (isinstance(sha256, str) and DIGITS.fullmatch(sha256)):
        raise ValueError(f"sha256 must be 64 hexadecimal digits, as sha256sum prints them, got {sha256!r}")


def check_digest(handle: BufferedReader, sha256: str | None) -> None:
    """Raise ValueError unless a file has this SHA-256; None: it may have any.

    Args:
        handle: at the start of the file, to which it returns.
        sha256: hexadecimal digits, upper or lower case.
    """
    if sha256 is None:
        return
    found = hashlib.file_digest(handle, "sha256").hexdigest()
    handle.seek(0)
    if found != sha256.lower():
        raise ValueError(
            f"its SHA-256 is {found}, not {sha256.lower()} as asked for: it is another file; do not use it, "
            f"and get the right one"
        )
