"""Write the .ipynb files of examples/notebooks from their sources.

``python scripts/notebooks.py`` keeps what was printed by notebooks whose code has not changed.
``python scripts/notebooks.py --run attention export`` runs two of them first, which takes minutes.
"""

import argparse
from pathlib import Path

from website import notebooks

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write the files next to their sources."""
    sources = {source.stem: source for source in notebooks.sources(ROOT)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs="+", default=[], choices=sources, help="notebooks to run first")
    run = parser.parse_args().run
    for name, source in sources.items():
        texts = notebooks.execute(source) if name in run else notebooks.printed(source)
        source.with_suffix(".ipynb").write_text(notebooks.ipynb(source, texts), encoding="utf-8")


if __name__ == "__main__":
    main()
