"""Starts processes for a test, none of which outlives it, however the test ends."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LONG_TEST_S = 480
"""A test that is long or uses Ray is ended after this time; see conftest.py."""


@contextmanager
def python(*args: str, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Yields a running Python with pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *args], env=env, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def watch_node(*args: str, env: Mapping[str, str] | None = None):
    return python("-m", "raycheck", "watch-node", *args, env=env)
