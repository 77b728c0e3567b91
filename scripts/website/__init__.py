"""Parts of the documentation site: API pages, pages of techniques, formulas, links, and checks."""
