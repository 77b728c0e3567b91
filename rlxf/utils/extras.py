"""Optional dependencies of rlxf: the installation command of an extra, and the lazy import of faiss."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of rlxf, quoted for a shell.

    The command uses the same source as this installation: a folder, a repository or an archive if pip
    recorded one in ``direct_url.json`` (PEP 610), else the package index.
    """
    source = _source()
    url = str(source.get("url", ""))
    requirement = f"rlxf[{extra}]"
    if "dir_info" in source:
        return _from_folder(Path(url2pathname(unquote(urlsplit(url).path))), extra, source["dir_info"])
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}"
    if url:
        requirement += f" @ {url}"
    return f"pip install {shlex.quote(requirement)}"


def import_faiss() -> Any:
    """Import and return the faiss module (extra ``knn``).

    Raises:
        ImportError: if faiss is not installed.
    """
    try:
        import faiss as module
    except ImportError as error:
        raise ImportError(
            f'index="faiss" requires faiss: run {install_command("knn")}, or use index="torch" ({error})'
        ) from error
    return module


def check_search_backend(name: str) -> None:
    """Raise ImportError if the search index of this name requires a package that is not installed."""
    if name == "faiss":
        import_faiss()


def _from_folder(folder: Path, extra: str, info: dict[str, Any]) -> str:
    edit = "-e " * bool(info.get("editable"))
    if (folder / "pyproject.toml").is_file():
        return f"pip install {edit}{shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install {edit}{shlex.quote(f'.[{extra}]')} in a checkout of rlxf"


def _source() -> dict[str, Any]:
    """Return pip's record of the source of this installation; empty for a package index."""
    try:
        text = distribution("rlxf").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}
