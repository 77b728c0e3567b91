"""Tests of the wheel in a virtual environment outside of the checkout, and of the two symbolic links."""

import ast
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import import_module
from importlib.metadata import Distribution, distribution, distributions, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlxf.envs
import rlxf.evaluation
import rlxf.training
from tests.lending import closure, lend, requirements
from tests.sources import ROOT, imported, parsed

LAZY_PACKAGES = [rlxf, rlxf.envs, rlxf.evaluation, rlxf.training]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without variables of the caller's Python environment."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def succeed(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Return a folder with the source distribution and the wheel, which is built from it as in a release."""
    folder = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def sources(dist) -> set[str]:
    """Return the names of the files in the source distribution."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def metadata(wheel) -> Distribution:
    """Return the metadata of the wheel."""
    return next(iter(distributions(path=[str(wheel)])))


@pytest.fixture(scope="module")
def python(wheel, metadata, tmp_path_factory) -> Path:
    """Return the Python interpreter of a new environment with the wheel and its requirements only.

    A real installation would download gigabytes in each run of the tests. Instead, the installed
    distributions of the declared requirements are linked into the new environment. The checkout is not among
    them: only the wheel provides rlxf.
    """
    folder = tmp_path_factory.mktemp("python") / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    lend(closure(requirements(metadata)), Path(sysconfig.get_path("purelib", "venv", paths)))
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    pip(python, "install", "--no-deps", "--no-index", wheel)
    return python


def pip(python: Path, *args: str | Path) -> str:
    return succeed(sys.executable, "-m", "pip", "--python", python, *args, cwd=python.parent)


def test_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"rlxf", f"rlxf-{rlxf.__version__}.dist-info"}
    assert {"rlxf/py.typed", "rlxf/agents/__init__.py", "rlxf/envs/__init__.py"} <= set(names)


def test_wheel_contains_all_files_of_the_package(wheel):
    assert files_below("rlxf") <= set(zipfile.ZipFile(wheel).namelist())


def test_source_distribution_contains_the_project_and_no_results(sources):
    expected = {"rlxf", "docs", "examples", "scripts", "tests", "zoo", ".github"}
    for folder in expected:
        assert files_below(folder) <= sources
    assert {"CITATION.cff", "SECURITY.md", "CHANGELOG.md", "constraints.txt", "LICENSE"} <= sources
    assert {"mkdocs.yml", "Dockerfile", "constraints-lowest.txt"} <= sources  # tests read them
    assert {name.partition("/")[0] for name in sources if "/" in name} == expected
    results = [name for name in sources if name.endswith((".zip", ".hdf5", ".pyc", ".pt", ".safetensors"))]
    assert all(name.startswith("zoo/") for name in results)


def files_below(folder: str) -> set[str]:
    files = [
        path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return {str(path.relative_to(ROOT)) for path in files}


def test_metadata_names_the_pages_of_the_project(metadata):
    urls = dict(entry.split(", ", 1) for entry in metadata.metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Repository", "Documentation", "Issues", "Changelog"}
    assert urls["Changelog"].startswith(urls["Repository"])
    assert (ROOT / urls["Changelog"].rpartition("/")[2]).is_file()


def test_citation_has_the_version_of_the_package():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {rlxf.__version__}" in citation


def test_lowest_versions_are_the_lower_bounds():
    """The file has one version of each direct requirement, those of the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        Requirement(line)
        for line in chain(project["dependencies"], *project["optional-dependencies"].values())
    ]
    bounds = {
        (canonicalize_name(each.name), bound.version)
        for each in declared
        for bound in each.specifier
        if bound.operator == ">="
    }
    assert {name for name, _version in bounds} == {canonicalize_name(each.name) for each in declared}
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    lowest = [tuple(line.split("==")) for line in text.splitlines() if not line.startswith("#")]
    assert lowest == sorted(bounds)


def test_every_extra_is_used(metadata):
    """A module imports a package of the extra, or names the extra in a message about missing packages."""
    homes = packages_distributions() | {"faiss": ["faiss-cpu"]}
    trees = [*parsed("rlxf").values(), *parsed("scripts").values()]
    used = {name.split(".")[0] for tree in trees for name in imported(tree)}
    texts = {
        node.value
        for tree in parsed("rlxf").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
    }
    provided = {canonicalize_name(home) for name in used | {"popgym"} for home in homes.get(name, [])}
    base = {canonicalize_name(each.name) for each in requirements(metadata)}
    for extra in set(metadata.metadata.get_all("Provides-Extra")) - {"dev"}:
        names = {canonicalize_name(each.name) for each in requirements(metadata, extra)} - base
        assert names & provided or extra in texts, f"no module uses the extra {extra}"


@pytest.mark.thorough
def test_wheel_is_imported_outside_of_the_checkout(python):
    where = succeed(python, "-c", "import rlxf; print(rlxf.__file__)", cwd=python.parent)
    assert python.parents[1] in Path(where).parents


def test_environment_has_only_declared_requirements(python):
    assert "No broken requirements found" in pip(python, "check")
    assert "No module named 'pytest'" in run(python, "-c", "import pytest", cwd=python.parent).stderr


def test_all_modules_can_be_imported_with_declared_requirements(python):
    modules = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "rlxf").rglob("*.py")]
    names = sorted(".".join(module.parts).removesuffix(".__init__") for module in modules)
    assert len(names) > 80
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    succeed(python, "-c", code, cwd=python.parent)


def test_imported_packages_are_declared(metadata):
    """Requirements must be direct or of an extra, not transitive; this includes lazy imports."""
    used = {name.split(".")[0] for tree in parsed("rlxf").values() for name in imported(tree)}
    optional = {"faiss": ["faiss-cpu"], "trackio": ["trackio"]}  # of extras that may not be installed
    provided = optional | packages_distributions()
    foreign = {name: set(provided[name]) for name in used - sys.stdlib_module_names - {"rlxf"}}
    declared = names_declared(metadata)
    missing = {
        name: homes for name, homes in foreign.items() if not declared & set(map(canonicalize_name, homes))
    }
    assert not missing, f"declare in pyproject.toml what provides {missing}"


def names_declared(metadata: Distribution) -> set[str]:
    """Return the distributions in the requirements, and those of their extras."""
    extras = ["", *metadata.metadata.get_all("Provides-Extra")]
    direct = [each for extra in extras if extra != "dev" for each in requirements(metadata, extra)]
    of_extras = [name for each in direct for extra in each.extras for name in added_by(each.name, extra)]
    return {canonicalize_name(name) for name in [*(each.name for each in direct), *of_extras]}


def added_by(name: str, extra: str) -> set[str]:
    with_extra, without = (requirements(distribution(name), each) for each in (extra, ""))
    return {each.name for each in with_extra} - {each.name for each in without}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("words", ["train gtrxl", "", "techniques"])
def test_help_of_the_installed_program(python, words):
    """tests/cli/test_entry_point.py tests the help of all commands in one process."""
    output = succeed(python.with_name("rlxf"), *words.split(), "--help", cwd=python.parent)
    assert f"usage: rlxf {words}".strip() in output


@pytest.mark.parametrize("link", ["agents", "envs"])
def test_symbolic_links_cannot_be_imported(link):
    assert (ROOT / link).samefile(ROOT / "rlxf" / link)
    result = run(sys.executable, "-c", f"import {link}", cwd=ROOT)
    assert f"write 'import rlxf.{link}'" in result.stderr


def test_import_registers_environments_without_torch(tmp_path):
    code = "import sys, gymnasium, rlxf; gymnasium.spec('rlxf/TMaze-v0'); print('torch' in sys.modules)"
    assert succeed(sys.executable, "-c", code, cwd=tmp_path) == "False\n"


@pytest.mark.parametrize("package", LAZY_PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_know_the_lazy_names(package):
    """They read imports and a literal ``__all__``; mypy's ``--strict`` exports no name of a computed one."""
    body = parsed("rlxf")[f"{package.__name__.replace('.', '/')}/__init__.py"].body
    blocks = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {f"{module}.{name}" for name, module in package._MODULES.items()}
    assert set(imported(ast.Module([*blocks], []))) == names
    lists = [node.value for node in body if ast.unparse(node).startswith("__all__ =")]
    assert [ast.literal_eval(value) for value in lists] == [package.__all__]
    assert {*package._MODULES} <= {*package.__all__}


@pytest.mark.parametrize("package", LAZY_PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_report_unknown_names(package):
    """A type checker accepts each name of a package in which it sees a function ``__getattr__``."""
    body = parsed("rlxf")[f"{package.__name__.replace('.', '/')}/__init__.py"].body
    guarded = [node for node in body if ast.unparse(node).startswith("if not TYPE_CHECKING:")]
    assert [node for node in body if "__getattr__" in ast.unparse(node)] == guarded != []


@pytest.mark.parametrize("package", LAZY_PACKAGES, ids=lambda package: package.__name__)
def test_lazy_names_are_those_of_their_modules(package):
    for name, module in package._MODULES.items():
        assert getattr(package, name) is getattr(import_module(module), name)
    assert {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match=rf"'{package.__name__}' has no attribute 'Misspelt'"):
        package.Misspelt  # noqa: B018


def test_misspelt_public_name_is_reported_with_the_valid_ones():
    with pytest.raises(AttributeError, match=r"'GTrXLPPPO'; it has .*GTrXLPPO"):
        rlxf.GTrXLPPPO  # noqa: B018


def test_classes_of_spaces_have_no_parameters_at_run_time():
    """Box, Discrete and MultiDiscrete are generic in new versions of Gymnasium only; Space always is."""
    spaces = {"Box", "Discrete", "MultiDiscrete", "MultiBinary"}
    for path, tree in parsed("rlxf").items():
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
        names = {ast.unparse(value).rpartition(".")[2] for value in used}
        assert not names & spaces, f"{path}: write this annotation in quotation marks"
