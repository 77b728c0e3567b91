#!/usr/bin/env bash
# Every check of the project. Arguments go to pytest: scripts/test.sh -k gates
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

scripts/setup.sh
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy
# Two processes of one thread each: torch's own threads would fight over the same cores.
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n 2 "$@"
