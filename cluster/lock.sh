#!/bin/sh
# Locks what cluster/demo.sh and tests/run.sh install: writes constraints-3.11.txt and constraints-3.12.txt from
# pyproject.toml and constraints.txt, for Linux on x86-64. Needs uv: pip install uv
# A version that still fits stays. What is given goes to uv: --upgrade takes the newest of all packages, and
# --upgrade-package NAME that of one.
set -eu
cd "$(dirname "$0")/.."
for version in 3.11 3.12; do
    locked=cluster/constraints-$version.txt
    uv pip compile pyproject.toml --extra train --extra demo --extra dev --constraint cluster/constraints.txt \
        --python-version "$version" --python-platform x86_64-manylinux_2_28 --no-python-downloads --quiet \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$locked" "$@" > /dev/null
    sed -i -E '/^(nvidia|cuda)-|^triton==/d' "$locked" # torch fixes these itself, and its CPU build has none of them
done
