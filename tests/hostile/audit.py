"""Audit of a process: imports, started processes, files opened for writing, and memory."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process_memory import peak_bytes, resident_bytes

STARTS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("pty.spawn", "os.startfile", "webbrowser.open", "ctypes.dlopen", "pickle.find_class"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "shutil.unpack_archive"),
)
"""Audit events that must not occur."""
CUDA_QUERY = ("ctypes.dlopen", ("libnvidia-ml.so.1",))
"""Event in which torch's builds for CUDA count the devices, whatever the files contain."""
CHANGES: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), ((0, 1),)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), ((0, 2),)),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 2), (1, 3))),
    "os.symlink": ((1, 2),),
}
"""Audit events that change folders: indices of path arguments and of their directory descriptors."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Seen:
    """Result of an audit.

    Args:
        events: forbidden events, as text.
        memory: peak memory minus the memory at the start, in bytes.
    """

    events: list[str] = field(default_factory=list)
    memory: int = 0


class Watch:
    """Audit hook with a switch, as audit hooks cannot be removed.

    Args:
        writable: folders in which files may be written.
        hostile: folder of the malicious files; no code from this folder may run.
    """

    def __init__(self, writable: list[Path], hostile: Path):
        self._writable = [str(folder.resolve()) for folder in writable] + ["/dev/null"]
        self._hostile = str(hostile.resolve())
        self._known: set[str] = set()
        self._seen: Seen | None = None
        sys.addaudithook(self._hook)

    @contextmanager
    def on(self) -> Iterator[Seen]:
        """Record forbidden events in this context. Known packages may import further modules of their own."""
        self._known = _packages()
        seen, before = Seen(), resident_bytes()
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None
            seen.memory = peak_bytes() - before
            # `importlib.import_module` raises no event of its own.
            seen.events += [f"import {name}" for name in sorted(_packages() - self._known)]

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        seen, self._seen = self._seen, None
        if seen is None:
            return
        try:
            forbidden = self._forbidden(event, args)
            seen.events += [forbidden] if forbidden else []
        finally:
            self._seen = seen

    def _forbidden(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event in STARTS:
            return None if (event, args) == CUDA_QUERY else f"{event} {args[:2]!r}"
        if event == "import":  # also raised for modules that do not exist
            return None if str(args[0]).partition(".")[0] in self._known else f"import {args[0]}"
        if event == "exec":
            name = getattr(args[0], "co_filename", "")
            return f"exec {name}" if name.startswith(self._hostile) else None
        if event == "open":
            return self._opened(*args)
        paths = [_from(args[path], args[folder]) for path, folder in CHANGES.get(event, ())]
        wrong = [path for path in paths if not self._is_writable(path)]
        return f"{event} {wrong}" if wrong else None

    def _opened(self, path: Any, mode: str | None, flags: int) -> str | None:
        writes = bool(set(mode or "") & set("wax+")) or bool(flags & WRITING)
        return f"open {path} {mode} {flags:o}" if writes and not self._is_writable(path) else None

    def _is_writable(self, path: Any) -> bool:
        if isinstance(path, int):
            return True  # already opened
        real = os.path.realpath(os.fsdecode(path))
        return any(real == folder or real.startswith(f"{folder}/") for folder in self._writable)


def _from(path: Any, folder: Any) -> Any:
    """Convert a path relative to a directory descriptor to an independent path."""
    return path if folder in (-1, None) else f"/proc/self/fd/{folder}/{os.fsdecode(path)}"


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}
