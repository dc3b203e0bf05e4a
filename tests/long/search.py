"""The property tests again and again, each round with inputs of another seed, until the time is up.

    python -m tests.long.search MINUTES [--all] [pytest's options or paths]

`sh tests/run.sh --search MINUTES` comes here. Each round prints the command that repeats it. What a round that fails has
printed is kept in a file: it has the failing input, which becomes a case of the default run as an @example, and for a
test that has no place for one as a test of its own. Ends with status 1 if a round has failed.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

FOUND = Path(".hypothesis", "found")


def search(minutes: float, options: list[str]) -> list[Path]:
    """Run at least one round. Returns the files of those that failed."""
    end, found = time.monotonic() + 60 * minutes, []
    while True:
        seed = secrets.randbelow(1 << 32)
        repeat = ["--search", f"--hypothesis-seed={seed}", "-m", "hypothesis", *options]
        print(f"PYTHONHASHSEED={seed} python -m pytest {' '.join(repeat)}", flush=True)
        round_ = subprocess.run(
            [sys.executable, "-m", "pytest", *repeat],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if round_.returncode:
            FOUND.mkdir(parents=True, exist_ok=True)
            found.append(FOUND / f"{seed}.txt")
            found[-1].write_bytes(round_.stdout)
        print(round_.stdout.decode(errors="replace"), flush=True)
        if time.monotonic() > end:
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    given, options = parser.parse_known_args()
    found = search(given.minutes, options)
    print(f"failed: {' '.join(map(str, found))}" if found else "every round has passed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
