#!/usr/bin/env bash
# Build the documentation site into site/. It fails on broken links and anchors, pages that are not in the navigation, and
# public names without documentation. "scripts/docs.sh serve" serves the site at http://127.0.0.1:8000 and rebuilds it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export NO_MKDOCS_2_WARNING=1 # a notice of the theme about other programs

scripts/setup.sh
if [ "${1:-}" = serve ]; then
    exec .venv/bin/python -m mkdocs serve --no-strict
fi
# Not with --quiet, which suppresses warnings before --strict counts them.
exec .venv/bin/python -m mkdocs build --strict
