"""What the tests of commands share."""

import pytest

from tests.cli.running import train


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run."""
    path = tmp_path_factory.mktemp("run") / "tmaze"
    looks = ["--attention-maps-every", "100", "--videos"]
    train(
        "--run", str(path), "--evaluate-every", "32", "--core.residual", "add", "--core.position=RoPE", *looks
    )
    return path
