"""A writer of a race as a separate process, and the writers that `raycheck doctor` has race.

Like two drivers, processes share no connection, no client and no lock. Each says when it is ready, and then takes a
turn for each line that it is sent.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from threading import Timer
from typing import IO, cast

from raycheck.bucket.diagnosis.race import Outcome, Turn, Writers, contend
from raycheck.bucket.store import Store, open_store
from raycheck.errors import RaycheckError, StoreError

TIMEOUT_S = 120.0
"""How long all turns together may take."""
_START = "import sys; sys.path[:] = {path!r}; from raycheck.bucket.diagnosis.racing_process import main; main()"
_READY = "ready"


@contextmanager
def by_processes(store: Store, count: int) -> Iterator[Writers]:
    """Yield writers that are processes of this machine; they end with the block.

    Raises StoreError if one of them does not start or does not answer in time, and the error that a store which allows
    no conditional write has raised in it.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(store, number)) for number in range(count)]
        watch = Timer(TIMEOUT_S, _kill, [processes])
        watch.daemon = True
        watch.start()
        stack.callback(watch.cancel)
        for process in processes:
            _answer(store, process)

        def take(turn: Turn) -> Sequence[Outcome]:
            line = json.dumps(asdict(turn)) + "\n"
            for process in processes:
                _pipe(process.stdin).write(line)
            for process in processes:
                _pipe(process.stdin).flush()
            return [cast("Outcome", _answer(store, process)) for process in processes]

        yield take


def _kill(processes: Sequence["subprocess.Popen[str]"]) -> None:
    for process in processes:
        process.kill()


@contextmanager
def _started(store: Store, number: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", _START.format(path=sys.path)]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            _pipe(process.stdin).write(json.dumps([store.uri, number]) + "\n")
            _pipe(process.stdin).flush()
            yield process
        finally:
            process.kill()


def _answer(store: Store, process: "subprocess.Popen[str]") -> str:
    line = _pipe(process.stdout).readline()
    if not line:
        raise StoreError(f"{store}: a process that raced for an object has died, or was too slow ({TIMEOUT_S:.0f} s)")
    word, said = json.loads(line)
    if word == "failed":
        raise StoreError(said)
    return str(said)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the process was started with pipes"
    return pipe


def main() -> None:
    """Take the turns that are sent by stdin, and answer each on stdout."""
    try:
        uri, number = json.loads(sys.stdin.readline())
        store = open_store(uri)
        store.list_names("probes/")  # the connection, and the credentials
        _say("is", _READY)
        for line in sys.stdin:
            _say("is", contend(store, Turn(**json.loads(line)), number))
    except RaycheckError as error:
        _say("failed", str(error))


def _say(word: str, text: str) -> None:
    sys.stdout.write(json.dumps([word, text]) + "\n")
    sys.stdout.flush()
