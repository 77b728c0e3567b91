"""Hooks of MkDocs that build the documentation site; mkdocs.yml names this file.

Pages of docs/ are written for reading in the repository. The hooks rewrite links that leave docs/, add
README.md, notebooks and others as pages, generate pages of the API and of techniques, and check the API
reference.
"""

import logging
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from website import api, coverage, notebooks, techniques
from website.formulas import with_mathml
from website.links import INCLUDED, overview, site_links, source_of
from website.references import with_references
from website.source_lines import with_lines

ROOT = Path(__file__).resolve().parents[1]
SEARCH_BOOSTS = {
    "faq.md": 2.0,
    "changelog.md": 0.3,
    "contributing.md": 0.3,
    "decisions.md": 0.3,
    "design.md": 0.3,
    f"{api.FOLDER}/": 0.3,
}
"""Start of the path of pages -> factor of their scores in the search.

Titles count most in a score, and each name of the API is a title: without factors, names precede guides.
"""
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add files that are not in docs/."""
    generated = {uri: (ROOT / source).read_text(encoding="utf-8") for source, uri in INCLUDED.items()}
    generated["overview.md"] = overview(generated["overview.md"])
    generated |= {page.uri: api.markdown(page) for page in api.ALL_PAGES}
    generated |= techniques.pages(ROOT)
    generated |= notebooks.pages(ROOT)
    generated["assets/site.css"] = (ROOT / "scripts" / "website" / "site.css").read_text(encoding="utf-8")
    for uri, content in generated.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite links, and set the link for editing an included page."""
    uri = page.file.src_uri
    repository = str(config.repo_url).rstrip("/")
    if uri in INCLUDED.values() or uri.startswith("notebooks/"):
        page.edit_url = f"{repository}/edit/main/{source_of(uri)}"
    if uri == techniques.LISTS[0]:
        page.meta["hide"] = ["toc"]  # its table needs the space
    page.meta["search"] = {"boost": search_boost(uri)}
    if uri in techniques.LISTS:
        markdown = techniques.with_links(markdown, uri)
    return site_links(with_lines(markdown, uri, ROOT), uri, ROOT, repository)


def search_boost(uri: str) -> float:
    """Return the factor of the scores of a page in the search, 1 by default."""
    return next((boost for start, boost in SEARCH_BOOSTS.items() if uri.startswith(start)), 1.0)


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Convert formulas to MathML, and complete links to sources and to names of the API."""
    html = with_mathml(html)
    if not page.file.src_uri.startswith(api.FOLDER):
        return with_references(html)
    return html.replace('href="source:', f'href="{str(config.repo_url).rstrip("/")}/blob/main/')


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Warn of public names that are not documented; with ``strict``, warnings fail the build."""
    documented = coverage.documented_names(Path(config.site_dir) / "objects.inv")
    for message in coverage.undocumented(api.required_names(), documented):
        log.warning(message)
