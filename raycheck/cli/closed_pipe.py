"""Ends the command quietly when the reader of its output has gone, as in `raycheck ls ... | head -1`.

Python ignores SIGPIPE, and has to: otherwise a store that closes a connection would end the process. So a write to a
pipe that nobody reads raises an error instead, which libraries turn into exit code 1. Here it means damage.
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
    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or raise SystemExit when there is no reader any more. What is written after that is dropped."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise SystemExit(CLOSED_PIPE) from None


def end_with_the_reader() -> None:
    """Have writes to stdout and stderr end the process by SystemExit(CLOSED_PIPE) when nobody reads them any more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
            stream.flush()
            raw = _PipeToReader(stream.fileno(), "wb", closefd=False)
            is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # else PYTHONUNBUFFERED is set
            again = io.TextIOWrapper(
                io.BufferedWriter(raw) if is_buffered else raw,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, again)
