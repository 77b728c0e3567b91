"""The package as its users get it: a wheel in an environment outside the checkout; and the two links."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import Distribution, distribution, distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import rlxf
from rlxf.cli.commands import COMMANDS
from tests.lending import closure, lend, requirements
from tests.sources import ROOT, imported, parsed


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
def metadata(wheel) -> Distribution:
    """What the wheel declares."""
    return next(iter(distributions(path=[str(wheel)])))


@pytest.fixture(scope="module")
def elsewhere(wheel, metadata, tmp_path_factory) -> Path:
    """The python of a new environment with the wheel and what it declares, and nothing else.

    A real installation would download gigabytes in each run of the tests. Instead the installed distributions
    that the declared requirements pull in, and no others, are linked into the new environment. The checkout
    is none of them: only the wheel provides rlxf.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    lend(closure(requirements(metadata)), Path(sysconfig.get_path("purelib", "venv", paths)))
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    pip(python, "install", "--no-deps", "--no-index", wheel)
    return python


def pip(python: Path, *args: str | Path) -> str:
    return succeed(sys.executable, "-m", "pip", "--python", python, *args, cwd=python.parent)


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"rlxf", f"rlxf-{rlxf.__version__}.dist-info"}
    assert {"rlxf/py.typed", "rlxf/agents/__init__.py", "rlxf/envs/__init__.py"} <= set(names)


def test_the_wheel_holds_every_source_file(wheel):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "rlxf").rglob("*.py")}
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_is_what_runs_outside_the_checkout(elsewhere):
    where = succeed(elsewhere, "-c", "import rlxf; print(rlxf.__file__)", cwd=elsewhere.parent)
    assert elsewhere.parents[1] in Path(where).parents


def test_only_what_is_declared_is_there(elsewhere):
    assert "No broken requirements found" in pip(elsewhere, "check")
    assert "No module named 'pytest'" in run(elsewhere, "-c", "import pytest", cwd=elsewhere.parent).stderr


def test_what_is_declared_is_enough_to_import_every_module(elsewhere):
    modules = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "rlxf").rglob("*.py")]
    names = sorted(".".join(module.parts).removesuffix(".__init__") for module in modules)
    assert len(names) > 80
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    succeed(elsewhere, "-c", code, cwd=elsewhere.parent)


def test_what_is_imported_anywhere_is_declared(metadata):
    """By name or as an extra, not by the grace of another requirement; also where it is imported late."""
    used = {name.split(".")[0] for tree in parsed("rlxf").values() for name in imported(tree)}
    provided = {"faiss": ["faiss-cpu"]} | packages_distributions()  # of an extra that need not be here
    foreign = {name: set(provided[name]) for name in used - sys.stdlib_module_names - {"rlxf"}}
    declared = names_declared(metadata)
    missing = {
        name: homes for name, homes in foreign.items() if not declared & set(map(canonicalize_name, homes))
    }
    assert not missing, f"declare in pyproject.toml what provides {missing}"


def names_declared(metadata: Distribution) -> set[str]:
    """Distributions that the requirements name, and those that the extras they ask for name."""
    extras = ["", *metadata.metadata.get_all("Provides-Extra")]
    asked = [each for extra in extras if extra != "dev" for each in requirements(metadata, extra)]
    behind = [name for each in asked for extra in each.extras for name in added_by(each.name, extra)]
    return {canonicalize_name(name) for name in [*(each.name for each in asked), *behind]}


def added_by(name: str, extra: str) -> set[str]:
    with_extra, without = (requirements(distribution(name), each) for each in (extra, ""))
    return {each.name for each in with_extra} - {each.name for each in without}


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_the_command_helps(elsewhere, words):
    shown = succeed(elsewhere.with_name("rlxf"), *words.split(), "--help", cwd=elsewhere.parent)
    assert f"usage: rlxf {words}".strip() in shown


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
    with pytest.raises(AttributeError, match=r"'GTrXLPPPO'; it offers .*GTrXLPPO"):
        rlxf.GTrXLPPPO  # noqa: B018
