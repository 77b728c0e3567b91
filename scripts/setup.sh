#!/usr/bin/env bash
# Create .venv with the tested versions and an editable install of this checkout, unless it is up to date.
# PYTHON=/path/to/python selects the interpreter; default: the first suitable one on PATH.
# CONSTRAINTS=constraints-lowest.txt selects the lowest versions that pyproject.toml allows; default: constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME PIP_USER

readonly stamp=.venv/rlxf-setup
readonly constraints=${CONSTRAINTS:-constraints.txt}
readonly new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c "$new_enough" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer among ${candidates[*]} ($("${candidates[0]}" --version 2>/dev/null || echo none));" \
        "install it, or give its path: PYTHON=/path/to/python3.11 $0"
}

required_stamp() {
    { "$python" --version && cat pyproject.toml "$constraints"; } |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# A virtual environment that was moved or copied with its checkout refers to its old path.
is_usable() {
    grep -qsF "$(pwd -P)/.venv" .venv/pyvenv.cfg &&
        [ "$(.venv/bin/python --version 2>/dev/null)" = "$("$python" --version)" ] &&
        .venv/bin/python -m pip --version >/dev/null 2>&1
}

make_environment() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian and Ubuntu: apt install python3-venv)"
    "$python" -m venv --clear .venv || fail "$python could not create .venv"
}

install() {
    .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint "$constraints" "$@" ||
        fail "pip could not install $*; see its message above, then run $0 again"
}

[ -f "$constraints" ] || fail "CONSTRAINTS must be a file, got $constraints"
python=$(find_python)
required=$(required_stamp)
if is_usable && [ "$(cat "$stamp" 2>/dev/null)" = "$required" ]; then
    exit 0
fi
echo "setup: installing into .venv, about two minutes the first time" >&2
rm -f "$stamp"
is_usable || make_environment
install torch
install --editable '.[dev,memory]'
echo "$required" >"$stamp"
echo "setup: done" >&2
