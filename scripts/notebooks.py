"""Write the .ipynb files of examples/notebooks from their sources: ``python scripts/notebooks.py``."""

from pathlib import Path

from website import notebooks

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write the files next to their sources."""
    for source in notebooks.sources(ROOT):
        source.with_suffix(".ipynb").write_text(notebooks.ipynb(source), encoding="utf-8")


if __name__ == "__main__":
    main()
