"""The package as its users get it: a wheel in an environment outside the checkout; and the two links."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import rlxf
from tests.sources import ROOT


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without what the caller's environment could lend it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def succeed(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    succeed(*build, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory) -> Path:
    """The python of a new environment that holds the wheel, and borrows its dependencies.

    They are borrowed by a .pth file, so no network is needed. The editable install of the checkout is itself
    a .pth file and is not followed from there: only the wheel provides rlxf.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    succeed(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    return python


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"rlxf", f"rlxf-{rlxf.__version__}.dist-info"}
    assert {"rlxf/py.typed", "rlxf/agents/__init__.py", "rlxf/envs/__init__.py"} <= set(names)


def test_the_wheel_holds_every_source_file(wheel):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "rlxf").rglob("*.py")}
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_runs_outside_the_checkout(elsewhere):
    where = succeed(elsewhere, "-c", "import rlxf; print(rlxf.__file__)", cwd=elsewhere.parent)
    assert elsewhere.parents[1] in Path(where).parents
    for name in rlxf.__all__:
        succeed(elsewhere, "-c", f"from rlxf import {name}", cwd=elsewhere.parent)


def test_the_command_helps(elsewhere):
    assert "usage: rlxf" in succeed(elsewhere.with_name("rlxf"), "--help", cwd=elsewhere.parent)


@pytest.mark.parametrize("link", ["agents", "envs"])
def test_a_link_is_for_readers_not_for_import(link):
    assert (ROOT / link).samefile(ROOT / "rlxf" / link)
    result = run(sys.executable, "-c", f"import {link}", cwd=ROOT)
    assert f"write 'import rlxf.{link}'" in result.stderr


def test_importing_the_package_registers_the_tasks_and_loads_no_torch(tmp_path):
    code = "import sys, gymnasium, rlxf; gymnasium.spec('rlxf/TMaze-v0'); print('torch' in sys.modules)"
    assert succeed(sys.executable, "-c", code, cwd=tmp_path) == "False\n"


@pytest.mark.parametrize("name", rlxf.__all__)
def test_a_public_name_is_the_one_of_its_home(name):
    home = __import__(rlxf._HOME[name], fromlist=[name])
    assert getattr(rlxf, name) is getattr(home, name)
    assert name in dir(rlxf)


def test_every_public_name_has_a_home():
    assert set(rlxf.__all__) == set(rlxf._HOME)


def test_a_misspelt_public_name_is_told_the_right_ones():
    with pytest.raises(AttributeError, match="'GTrXLPPPO'; it offers GTrXLPPO"):
        rlxf.GTrXLPPPO  # noqa: B018
