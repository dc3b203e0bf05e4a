"""Runs the command line `raycheck` inside the process of the tests.

A process of its own costs a second for each command. That the command works as one, with its pipes, its signals and what
it may import, is what the tests that start `python -m raycheck` are for.
"""

import io
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TextIO
from unittest import mock

from raycheck.cli import main


def raycheck(*args: str, stderr: io.StringIO | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs one command. Returns its exit code and what it printed. stderr: where it prints its errors."""
    stdout, stderr = io.StringIO(), stderr or io.StringIO()
    code = exit_code_of(args, stdout, stderr)
    return subprocess.CompletedProcess(args, code, stdout.getvalue(), stderr.getvalue())


def exit_code_of(args: Sequence[str], stdout: TextIO, stderr: TextIO) -> int:
    """Runs one command, which prints there. Returns its exit code."""
    code: object = 0
    with mock.patch.object(sys, "argv", ["raycheck", *args]), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None), code
    return code or 0
