#!/usr/bin/env bash
# Build the files of a release, check them, install the wheel into a new environment, and train and evaluate an agent.
# Usage: scripts/release_check.sh [FOLDER for the files, by default a temporary one]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME PIP_USER

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
readonly files=${1:-$work/dist}
readonly python=${PYTHON:-python3}

say() {
    printf 'release check: %s\n' "$*" >&2
}

fail() {
    say "$*"
    exit 1
}

new_environment() { # NAME PACKAGE...
    "$python" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

is_empty() {
    [ -z "$(ls -A "$1" 2>/dev/null)" ]
}

build() {
    is_empty "$files" || fail "$files is not empty; give another folder"
    new_environment tools 'build>=1.2' 'twine>=6'
    "$work/tools/bin/python" -m build --outdir "$files" .
    "$work/tools/bin/python" -m twine check --strict "$files"/*
}

# The wheel is built from the source distribution, so a file that the latter lacks is missing in both.
check_contents() {
    local missing
    missing=$(comm -23 \
        <(git ls-files 'rlxf/*' 2>/dev/null | sort || find rlxf -name '*.py' | sort) \
        <("$python" -m zipfile --list "$files"/*.whl | awk '{print $1}' | sort))
    [ -z "$missing" ] || fail "the wheel lacks $missing"
}

try_wheel() {
    new_environment fresh --constraint constraints.txt torch
    "$work/fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$files"/*.whl
    "$work/fresh/bin/python" -m pip check
    cd "$work"
    [ "$(fresh/bin/rlxf --version)" = "rlxf $version" ] || fail "rlxf --version prints $(fresh/bin/rlxf --version)"
    fresh/bin/rlxf train gtrxl --env rlxf/TMaze-v0 --env-kwargs '{"corridor_length": 5}' --total-timesteps 12000 \
        --core.memory.length 16 --segment-length 16 --n-steps 16 --batch-size 128 --run run --no-progress-bar
    fresh/bin/rlxf evaluate run --episodes 100 --no-progress-bar
}

# Each extra is installed in an environment of its own, since extras may need different versions of a package.
try_extras() {
    local extra
    for extra in box2d export experiment hub knn memory mujoco sweep track; do
        say "extra $extra"
        new_environment "$extra" --constraint constraints.txt torch
        "$work/$extra/bin/python" -m pip install --quiet --disable-pip-version-check "$(echo "$files"/*.whl)[$extra]"
        "$work/$extra/bin/python" -m pip check
        "$work/$extra/bin/python" -c 'from rlxf import GTrXLPPO'
        rm -r "${work:?}/$extra"
    done
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
readonly version
build
say "contents of the wheel"
check_contents
try_extras
say "the wheel in a new environment"
try_wheel
say "rlxf $version is ready"
