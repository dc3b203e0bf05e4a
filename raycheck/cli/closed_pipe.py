"""Ends the command quietly if the reader of its output has gone, as in `raycheck ls ... | head -1`.

Python ignores SIGPIPE, and must: otherwise a store that closes a connection would end the process. So a write to a pipe
without a reader raises an error instead, which libraries turn into exit code 1. Here that code means damage.

Only a lost reader of stdout ends a command, and only if the output is the command's purpose. Without a reader of
stderr, messages are dropped. Without a reader of stdout, commands that serve or follow drop their lines and continue.
"""

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CLOSED_PIPE = 141
"""The exit code that a shell shows for a program that SIGPIPE has ended: 128 + 13."""


class _PipeToReader(io.FileIO):
    ends_command = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the data. If there is no reader any more, drop it, and raise SystemExit if `ends_command`."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.ends_command:
                raise SystemExit(CLOSED_PIPE) from None
            return memoryview(data).nbytes


def end_with_the_reader() -> None:
    """Make writes to stdout end the process by SystemExit(CLOSED_PIPE) once nobody reads it.

    Writes to stderr without a reader are dropped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
            stream.flush()
            raw = _PipeToReader(stream.fileno(), "wb", closefd=False)
            raw.ends_command = name == "stdout"
            is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # else PYTHONUNBUFFERED is set
            again = io.TextIOWrapper(
                io.BufferedWriter(raw) if is_buffered else raw,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, again)


def continue_without_reader() -> None:
    """Make this command continue without a reader of its stdout, because it serves or follows something."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if isinstance(raw, _PipeToReader):
        raw.ends_command = False
