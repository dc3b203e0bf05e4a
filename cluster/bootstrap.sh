# Sourced by cluster/demo.sh and tests/run.sh: creates or reuses .venv next to this repository's README.
# Usage: extras=train,demo . cluster/bootstrap.sh      (leaves $python set)
# If RAYCHECK_PYTHON is set, $python is that, and nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${RAYCHECK_PYTHON:-$root/.venv/bin/python}
base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "raycheck needs Python 3.11 or newer; '$base' is not. Set PYTHON=/path/to/python3.11 and run again." >&2
    exit 1
}
# All versions are locked for Pythons with a lock file (made by cluster/lock.sh); for others only a few are pinned.
version=$("$base" -c 'import sys; print(*sys.version_info[:2], sep=".")')
if [ -x "$python" ]; then version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")'); fi
constraints=$root/cluster/constraints-$version.txt
[ -f "$constraints" ] || constraints=$root/cluster/constraints.txt
# The stamp records the inputs of the last install, so that a second run installs nothing.
want="$extras $(cat "$root/pyproject.toml" "$constraints" | cksum)"
stamp=$root/.venv/raycheck-$(echo "$extras" | tr ',' '-')
if [ -z "${RAYCHECK_PYTHON:-}" ] && [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "Setting up $root/.venv for raycheck[$extras] (once; a few minutes) ..." >&2
    [ "$constraints" != "$root/cluster/constraints.txt" ] ||
        echo "No versions are locked for Python $version: most packages come in the newest version that fits." >&2
    [ -x "$python" ] || "$base" -m venv "$root/.venv"
    # Without compiling every module of every package, which took most of the time: Python compiles what it imports.
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$constraints" --editable "$root[$extras]"
    echo "$want" > "$stamp"
fi
