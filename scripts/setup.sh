#!/usr/bin/env bash
# Make .venv with the tested versions and this checkout in it. At once done when that is already there.
# PYTHON=/path/to/python chooses the interpreter; else it is the first good one on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME PIP_USER

readonly stamp=.venv/rlxf-setup
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
        "install one, or name it: PYTHON=/path/to/python3.11 $0"
}

wanted() {
    { "$python" --version && cat pyproject.toml constraints.txt; } |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# An environment that was moved or copied along with its checkout still points at the old place.
is_usable() {
    grep -qsF "$(pwd -P)/.venv" .venv/pyvenv.cfg &&
        [ "$(.venv/bin/python --version 2>/dev/null)" = "$("$python" --version)" ] &&
        .venv/bin/python -m pip --version >/dev/null 2>&1
}

make_environment() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian and Ubuntu: apt install python3-venv)"
    "$python" -m venv --clear .venv || fail "$python could not make .venv"
}

install() {
    .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt "$@" ||
        fail "pip could not install $*; see its message above, then run $0 again"
}

python=$(find_python)
wanted=$(wanted)
if is_usable && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
echo "setup: installing into .venv, about two minutes the first time" >&2
rm -f "$stamp"
is_usable || make_environment
install torch
install --editable '.[dev,memory]'
echo "$wanted" >"$stamp"
echo "setup: done" >&2
