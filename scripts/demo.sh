#!/usr/bin/env bash
# Train GTrXL and a Decision Transformer on a task that requires memory. Arguments are passed to scripts/demo.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
