#!/usr/bin/env bash
# Train GTrXL on a task that needs memory and show what came of it. Arguments go to scripts/demo.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
