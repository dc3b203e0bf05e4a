# Sourced by cluster/demo.sh and tests/run.sh: makes or reuses .venv beside this repository's README.
# Usage: extras=train,demo . cluster/bootstrap.sh      (leaves $python set)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "raycheck needs Python 3.11 or newer; '$base' is not. Set PYTHON=/path/to/python3.11 and run again." >&2
    exit 1
}
# The stamp holds what was installed for which inputs, so that a second run costs nothing.
want="$extras $(cat "$root/pyproject.toml" "$root/cluster/constraints.txt" | cksum)"
stamp=$root/.venv/raycheck-$(echo "$extras" | tr ',' '-')
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "Setting up $root/.venv for raycheck[$extras] (once; a few minutes) ..." >&2
    [ -x "$python" ] || "$base" -m venv "$root/.venv"
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/cluster/constraints.txt" --editable "$root[$extras]"
    echo "$want" > "$stamp"
fi
