"""Hooks of MkDocs that build the documentation site; mkdocs.yml names this file.

Pages of docs/ are written for reading in the repository. The hooks rewrite links that leave docs/, add README.md and
others as pages, and generate the pages of the API and of techniques from the code.
"""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from website import api, techniques
from website.formulas import with_mathml
from website.links import INCLUDED, site_links, source_of

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add pages that are not in docs/."""
    for source, uri in INCLUDED.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in [*api.PAGES, api.FURTHER, api.INTERFACES]:
        files.append(File.generated(config, page.uri, content=api.markdown(page)))
    css = (ROOT / "scripts" / "website" / "site.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "assets/site.css", content=css))
    for uri, content in techniques.pages(ROOT).items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite links, and set the link for editing a page."""
    uri = page.file.src_uri
    repository = str(config.repo_url).rstrip("/")
    if uri in INCLUDED:
        page.edit_url = f"{repository}/edit/main/{source_of(uri)}"
    if uri in techniques.LISTS:
        markdown = techniques.with_links(markdown, uri)
    return site_links(markdown, uri, ROOT, repository)


def on_page_content(html: str, **_: Any) -> str:
    """Convert formulas to MathML."""
    return with_mathml(html)
