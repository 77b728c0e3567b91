#!/usr/bin/env bash
# Run all checks of the project. Arguments are passed to pytest: scripts/test.sh -k gates
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

scripts/setup.sh
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy & # next to the site: each of them uses one core
types=$!
scripts/docs.sh
wait "$types"
# Two processes with one thread each: with more threads, torch would oversubscribe the cores. A process keeps the
# tests of a file together, because they share fixtures, and takes over tests of the other one when it is idle.
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
