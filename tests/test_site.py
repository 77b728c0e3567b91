"""Tests of the documentation site, except its whole build, which scripts/docs.sh does."""

import re
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from site_hooks import search_boost
from website import api, coverage, links, masks, names, notebooks, techniques
from website.formulas import FormulaError, formula_latex, is_formula, latex_to_mathml, with_mathml
from website.prose import prepared

from rlxf.attention.registry import TECHNIQUES
from tests.sources import ROOT

REPOSITORY = "https://github.com/rlxf/rlxf"
FORMULA = re.compile(r"``([^`]+)``")


class Loader(yaml.SafeLoader):
    """Loader of mkdocs.yml, which constructs no Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def settings() -> dict:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def listed(nav) -> list[str]:
    """Return the files of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [file for each in (nav.values() if isinstance(nav, dict) else nav) for file in listed(each)]


# Navigation ----------------------------------------------------------------------------------------------


def test_navigation_lists_every_page_once():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    generated = {*links.INCLUDED.values(), *api.owned(), *techniques.pages(ROOT), *notebooks.pages(ROOT)}
    assert sorted(listed(settings()["nav"])) == sorted(pages | generated)


def test_omitted_pages_links_and_anchors_are_checked():
    validation = settings()["validation"]
    assert validation.pop("nav") == {"omitted_files": "warn", "not_found": "warn"}
    assert validation == dict.fromkeys(
        ("omitted_files", "absolute_links", "unrecognized_links", "anchors"), "warn"
    )


def test_build_is_strict():
    """With ``--quiet``, MkDocs does not count warnings."""
    command = (ROOT / "scripts" / "docs.sh").read_text(encoding="utf-8").splitlines()[-1]
    assert command.endswith("mkdocs build --strict")


def test_search_ranks_answers_before_guides_and_guides_before_names_of_the_api():
    assert search_boost("faq.md") > search_boost("how-to/distill.md") > search_boost("reference/api/data.md")


# Links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "../README.md", "overview.md"),
        ("index.md", "../README.md#results", "overview.md#results"),
        (
            "index.md",
            "../README.md#decision-transformer",
            f"{REPOSITORY}/blob/main/README.md#decision-transformer",
        ),
        ("index.md", "../zoo/README.md", "trained-agents.md"),
        ("trained-agents.md", "TMaze/README.md", "TMaze/README.md"),
        (
            "trained-agents.md",
            "TMaze-50-gtrxl/README.md",
            f"{REPOSITORY}/blob/main/zoo/TMaze-50-gtrxl/README.md",
        ),
        ("examples.md", "log_sparse.py", f"{REPOSITORY}/blob/main/examples/log_sparse.py"),
        ("how-to/distill.md", "../../CONTRIBUTING.md#style", "../contributing.md#style"),
        ("how-to/distill.md", "../reference/files.md", "../reference/files.md"),
        ("overview.md", "docs/reference/files.md#x", "reference/files.md#x"),
        ("overview.md", "LICENSE", f"{REPOSITORY}/blob/main/LICENSE"),
        ("contributing.md", "rlxf/attention", f"{REPOSITORY}/tree/main/rlxf/attention"),
        ("notebooks.md", "../examples/notebooks/export.py", "notebooks/export.md"),
        ("notebooks/memory-task.md", "export.py#a", "export.md#a"),
        ("notebooks/memory-task.md", "../../docs/faq.md", "../faq.md"),
        ("notebooks/memory-task.md", "../log_sparse.py", f"{REPOSITORY}/blob/main/examples/log_sparse.py"),
        ("index.md", "missing.md", "missing.md"),
        ("index.md", "../missing.py", "../missing.py"),
        ("index.md", "https://arxiv.org", "https://arxiv.org"),
        ("index.md", "#install", "#install"),
    ],
)
def test_links_of_pages(page, link, expected):
    assert links.site_links(f"[a]({link})", page, ROOT, REPOSITORY) == f"[a]({expected})"


def test_overview_begins_with_the_features():
    page = links.overview((ROOT / "README.md").read_text(encoding="utf-8"))
    assert page.startswith("# Overview\n\n## Features\n")
    assert "## Results\n" in page


def test_links_in_programs_do_not_change():
    program = "```python\nx[0](../README.md)\n```"
    assert links.site_links(program, "index.md", ROOT, REPOSITORY) == program


def small_config(folder) -> Path:
    """Write the configuration of a site with one page in its navigation, and the checks of mkdocs.yml."""
    config = {
        "site_name": "small",
        "plugins": [],
        "strict": True,
        "nav": ["index.md"],
        "validation": settings()["validation"],
    }
    file = folder / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config))
    (folder / "docs").mkdir()
    return file


def build_small_site(folder, **pages: str) -> None:
    """Build a site with the given pages."""
    file = small_config(folder)
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    build(load_config(str(file)))


@pytest.mark.parametrize(
    ("text", "named"),
    [("[a](missing.md)", "missing.md"), ("[a](#missing)", "#missing"), ("[a](/index.md)", "/index.md")],
)
def test_broken_link_fails_the_build_and_is_named(text, named, tmp_path, caplog):
    with pytest.raises(Abort):
        build_small_site(tmp_path, index=f"# Page\n\n{text}\n")
    assert named in caplog.text


def test_page_outside_of_the_navigation_fails_the_build_and_is_named(tmp_path, caplog):
    with pytest.raises(Abort):
        build_small_site(tmp_path, index="# Page\n", forgotten="# Other\n")
    assert "forgotten.md" in caplog.text


def test_small_site_without_faults_is_built(tmp_path):
    build_small_site(tmp_path, index="# Page\n\n[a](#page)\n")
    assert (tmp_path / "site" / "index.html").is_file()


def test_hooks_warn_of_undocumented_names(monkeypatch, tmp_path, caplog):
    import site_hooks

    monkeypatch.setattr(
        coverage, "documented_names", lambda inventory: api.required_names() - {"rlxf.data.Windows"}
    )
    monkeypatch.setattr(names, "canonical", lambda name: name)
    site_hooks.on_post_build(load_config(config_file_path=None, site_dir=str(tmp_path)))
    assert {record.levelname for record in caplog.records} == {"WARNING"}, "strict builds fail on warnings"
    assert "rlxf.data.Windows is public, but the API reference has no entry" in caplog.text


# API reference -------------------------------------------------------------------------------------------


def test_packages_with_public_names_have_a_page():
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "rlxf").rglob("__init__.py")
        if "__all__" in file.read_text(encoding="utf-8")
    }
    documented = {page.package for page in api.PAGES}
    # Other packages export the names of the first two; the command line has its own reference page.
    assert packages - documented == {"rlxf.collection", "rlxf.agents.offline.objectives", "rlxf.cli"}


def test_public_names_have_docstrings():
    required = api.required_names()
    assert {"rlxf.GTrXLPPO", "rlxf.attention.RoPE", "rlxf.envs.TMaze", "rlxf.data.SAMPLINGS"} <= required
    assert list(coverage.undocumented(required, required)) == []


def test_each_public_name_has_one_entry():
    entries = [names.canonical(name) for names_ in api.owned().values() for name in names_]
    assert len(entries) == len(set(entries))
    assert {names.canonical(name) for name in api.required_names()} <= set(entries)


@pytest.mark.parametrize("package", ["rlxf", "rlxf.attention", "rlxf.envs", "rlxf.data"])
def test_undocumented_public_name_is_named(package):
    removed = f"{package}.{names.public_names(package)[0]}"
    documented = {names.canonical(name) for name in api.required_names()} - {names.canonical(removed)}
    assert any(removed in message for message in coverage.undocumented(api.required_names(), documented))


def test_public_name_without_docstring_is_named(monkeypatch):
    from rlxf.data import Windows

    monkeypatch.setattr(Windows, "__doc__", None)
    [message] = coverage.undocumented(["rlxf.data.Windows"], {"rlxf.data.Windows"})
    assert message == "rlxf.data.Windows is public, but has no docstring"


# Docstrings and formulas ---------------------------------------------------------------------------------


def test_references_of_docstrings_are_links():
    text = prepared(
        "See `Windows.gather`, ``Windows(8)`` and `other`.",
        {"Windows.gather": "rlxf.data.Windows.gather"}.get,
    )
    assert '<autoref identifier="rlxf.data.Windows.gather" optional>' in text
    assert "``Windows(8)`` and <code>other</code>." in text


def test_shared_entries_are_split():
    text = prepared("Args:\n    a, b: numbers,\n        at least 1.\n    c: text.\n")
    assert (
        text
        == "Args:\n    a: numbers,\n        at least 1.\n    b: numbers,\n        at least 1.\n    c: text.\n"
    )


@pytest.mark.parametrize(
    ("formula", "latex"),
    [
        ("x_t += p_t", r"x_{t}\mathrel{+}= p_{t}"),
        ("a b / sqrt(c)", r"\frac{a\,b}{\sqrt{c}}"),
        ("1 + a / (b + c)", r"1+\frac{a}{b+c}"),
        ("f(x) = e^b_h", r"f\left(x\right)=e^{b_{h}}"),
        ("k_t v_t^T", r"k_{t}\,v_{t}^{T}"),
        ("h_(t-1)", r"h_{t-1}"),
        ("p(a | c)", r"p\left(a\mid c\right)"),
        ("|x| / 2", r"\frac{\left\vert x\right\vert }{2}"),
        ("a (x) b", r"a\,\otimes \,b"),
        ("sum_j w_j", r"\sum\nolimits _{j}\,w_{j}"),
    ],
)
def test_formulas_as_latex(formula, latex):
    assert is_formula(formula)
    assert formula_latex(formula) == latex


@pytest.mark.parametrize("formula", ["(a", "a)", "a ^ b", "sqrt(a]", "a & b"])
def test_other_text_is_no_formula(formula):
    with pytest.raises(FormulaError):
        formula_latex(formula)


@pytest.mark.parametrize(
    "code",
    [
        "size",
        "Window(M + 1)",
        'norm="pre"',
        "causal=False",
        "t // S",
        "nn.LSTM",
        "draw_sharing",
        "window / 2",
    ],
)
def test_code_is_no_formula(code):
    assert not is_formula(code)


@pytest.mark.parametrize("technique", [each for axis in TECHNIQUES.values() for each in axis.values()])
def test_formulas_of_techniques_can_be_rendered(technique):
    for code in FORMULA.findall(technique.__doc__):
        if is_formula(" ".join(code.split())):
            assert latex_to_mathml(formula_latex(" ".join(code.split()))).startswith("<math")


def test_latex_of_pages_is_rendered():
    html = with_mathml(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>')
    assert html.startswith("<p><math")
    assert "&#x0003C;" in html


# Pages of techniques -------------------------------------------------------------------------------------


def test_all_techniques_are_explained():
    tables = techniques.Tables(ROOT)
    for axis, members in techniques.AXES.items():
        text = techniques.page(axis, tables)
        assert re.findall(r"^## (\w+)$", text, re.M) == list(members)
        assert not set(members) - set(tables.use), "explanation/choose-techniques.md"
        assert not set(members) - set(tables.definition)


def test_all_patterns_have_a_picture():
    assert set(TECHNIQUES["pattern"]) <= set(masks.EXAMPLES)


def cells_of(picture):
    """Return the visible keys of each query in a picture."""
    assert picture.count("<svg") == 1
    causal = re.search(r'class="causal" d="([^"]*)"', picture)[1]
    rows = {y: [] for y in range(masks.LENGTH)}
    for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", causal):
        rows[int(y)] += range(int(x), int(x) + int(width))
    return rows


def test_picture_shows_the_mask():
    pattern = masks.EXAMPLES["AttentionSinks"]
    for i, seen in cells_of(masks.figure("AttentionSinks")).items():
        assert seen == [j for j in range(i + 1) if i - j < pattern.size or j < pattern.sinks]


def test_pictures_of_kernels_show_their_rule():
    assert all(any(cells_of(masks.figure(name)).values()) for name in masks.KERNELS)
    span = masks.KERNELS["AdaptiveSpan"]
    for i, seen in cells_of(masks.figure("AdaptiveSpan")).items():
        assert seen == [j for j in range(i + 1) if i - j < span.start + span.ramp]
    buckets = cells_of(masks.figure("LSH"))
    for i, seen in buckets.items():  # tokens of one bucket see the same earlier tokens
        others = [j for j in seen if j < i]
        assert all(set(buckets[j]) - {j} <= set(others) for j in others)


@pytest.mark.parametrize("name", masks.SEGMENTED)
def test_pictures_of_segments_show_memory_tokens_and_write_tokens(name):
    memory = masks.SEGMENTED[name]
    assert memory.segment + 2 * memory.tokens == masks.LENGTH
    last = memory.tokens + memory.segment
    for i, seen in cells_of(masks.figure(name)).items():
        group = memory.tokens if i < memory.tokens else masks.LENGTH if i >= last else i + 1
        assert seen == list(range(i + 1 if memory.mask == "causal" else group))


def test_names_in_tables_link_to_explanations():
    text = (ROOT / "docs" / "reference" / "techniques.md").read_text(encoding="utf-8")
    linked = techniques.with_links(text, "reference/techniques.md")
    for axis, members in techniques.AXES.items():
        for name in members:
            assert f"[`{name}`](../explanation/techniques/{axis}.md#{name.lower()})" in linked
