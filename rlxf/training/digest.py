"""Check of the SHA-256 of a whole file against an expected value."""

import hashlib
import re
from io import BufferedReader

DIGITS = re.compile("[0-9a-fA-F]{64}")


def check_digits(sha256: str | None) -> None:
    """Raise ValueError unless ``sha256`` is None or 64 hexadecimal digits."""
    if sha256 is not None and not (isinstance(sha256, str) and DIGITS.fullmatch(sha256)):
        raise ValueError(f"sha256 must be 64 hexadecimal digits, as sha256sum prints them, got {sha256!r}")


def check_digest(handle: BufferedReader, sha256: str | None) -> None:
    """Raise ValueError if a file has another SHA-256.

    Args:
        handle: file handle at the start of the file; it is rewound to the start afterwards.
        sha256: expected hexadecimal digits, in upper or lower case. None accepts any file.
    """
    if sha256 is None:
        return
    actual = hashlib.file_digest(handle, "sha256").hexdigest()
    handle.seek(0)
    if actual != sha256.lower():
        raise ValueError(
            f"its SHA-256 is {actual}, but {sha256.lower()} is expected: it is another file; do not use it, "
            f"and obtain the expected file"
        )
