"""Tests of the installation command for extras."""

import json
import shlex
import subprocess

import pytest

from rlxf.utils import extras
from rlxf.utils.extras import install_command


@pytest.fixture
def installed(monkeypatch):
    """Return a function that sets the content of direct_url.json; None: installation from an index."""

    class Installed:
        def __init__(self, source):
            self.source = source

        def read_text(self, name):
            return json.dumps(self.source) if name == "direct_url.json" and self.source else None

    def install(source):
        monkeypatch.setattr(extras, "distribution", lambda name: Installed(source))

    return install


def test_installation_from_an_index(installed):
    installed(None)
    assert install_command("memory") == "pip install 'rlxf[memory]'"


@pytest.mark.parametrize("editable", [True, False])
def test_installation_from_a_checkout(installed, tmp_path, editable):
    folder = tmp_path / "my rlxf"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    installed({"url": folder.as_uri(), "dir_info": {"editable": editable}})
    words = shlex.split(install_command("memory"))
    assert words == ["pip", "install", *["-e"] * editable, f"{folder}[memory]"]


def test_deleted_checkout_is_not_named(installed, tmp_path):
    installed({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert install_command("knn") == "pip install '.[knn]' in a checkout of rlxf"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"url": "https://a.b/rlxf.git", "vcs_info": {"vcs": "git"}}, "rlxf[knn] @ git+https://a.b/rlxf.git"),
        ({"url": "https://a.b/rlxf.whl", "archive_info": {}}, "rlxf[knn] @ https://a.b/rlxf.whl"),
    ],
)
def test_installation_from_a_repository_or_an_archive(installed, source, expected):
    installed(source)
    assert shlex.split(install_command("knn")) == ["pip", "install", expected]


def test_brackets_are_quoted_for_shells(installed):
    """zsh rejects an unquoted pattern that matches no file, as bash does with failglob."""
    installed(None)
    line = install_command("memory").replace("pip install", "printf %s")
    done = subprocess.run(["bash", "-O", "failglob", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "rlxf[memory]"
