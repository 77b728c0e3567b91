"""Memory of this process on Linux, read from /proc."""

from pathlib import Path


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes, and reset the peak of `peak_bytes`."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak of resident memory in bytes since `resident_bytes` was called or the start."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
