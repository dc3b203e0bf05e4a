"""The checks with the newest of all packages, in an environment of its own: which are newer than the locked, what breaks.

    python -m tests.long.newest [--torch] [options or paths of tests/run.sh]

`sh tests/run.sh --newest` comes here. Torch stays at the locked version, since the newest that an index has may come
with gigabytes of CUDA; --torch takes that one, too. What is newer is printed first, and again before what failed.
"""

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-newest"
PYTHON = VENV / "bin" / "python"
FAILURE = re.compile(rb"(FAILED|ERROR) |.*: error: |.*\bFound \d+ errors?")
"""Lines of pytest's summary, of mypy and of ruff that name what broke."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    version = ".".join(map(str, sys.version_info[:2]))
    lines = (ROOT / "cluster" / f"constraints-{version}.txt").read_text().splitlines()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def install(*, with_torch: bool) -> dict[str, str]:
    """Make the environment anew, in the newest versions that fit together. Returns what is in it."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "uv"], check=True)
    kept = VENV / "kept.txt"
    kept.write_text("" if with_torch else f"torch=={locked()['torch']}\n")
    extras = [f"--extra={extra}" for extra in ("train", "demo", "dev")]
    options = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--constraint", kept]
    newest = VENV / "newest.txt"
    # Pip alone finds no versions that fit together, and uv would take torch with CUDA where pip has another build.
    subprocess.run(
        [PYTHON, "-m", "uv", "pip", "compile", ROOT / "pyproject.toml", *extras, *options, "--output-file", newest],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = [line for line in newest.read_text().splitlines() if not line.startswith(("nvidia-", "cuda-", "triton="))]
    newest.write_text("\n".join(lines) + "\n")
    subprocess.run([*pip, "--constraint", newest, "--editable", f"{ROOT}[train,demo,dev]"], check=True)
    (libraries,) = VENV.glob("lib/python*/site-packages")
    return {canonical(found.name): found.version for found in distributions(path=[str(libraries)])}


def differences(here: dict[str, str]) -> list[str]:
    """Returns a line for each package that is not as it is locked."""
    before = locked()
    pairs = [(name, before.get(name, "not locked"), here.get(name, "not installed")) for name in sorted(before | here)]
    ours = {"raycheck", "pip", "uv"}
    return [f"{name} {old} -> {new}" for name, old, new in pairs if new.partition("+")[0] != old and name not in ours]


def run(options: list[str]) -> tuple[int, list[str]]:
    """Returns the status of tests/run.sh, and the lines that say what failed."""
    environment = {**os.environ, "RAYCHECK_PYTHON": str(PYTHON)}
    command = ["sh", str(ROOT / "tests" / "run.sh"), *options]
    failed = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as checks:
        assert checks.stdout is not None
        for line in checks.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if FAILURE.match(line):
                failed.append(line.decode(errors="replace").rstrip())
    return checks.returncode, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true")
    given, options = parser.parse_known_args()
    newer = ["other than locked:", *differences(install(with_torch=given.torch))]
    print("\n".join(newer), flush=True)
    status, failed = run(options)
    print("\n".join([*newer, "broken with these:", *(failed or ["nothing"])]))
    sys.exit(status)


if __name__ == "__main__":
    main()
