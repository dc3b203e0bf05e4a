"""The server's own state, in one SQLite file: sessions, models, and every request with its result.

A request is acknowledged once it is in this file, so killing the server loses none. Requests that changed a model since
its newest checkpoint keep their bodies: after a restart they run again, in order, on the state in the bucket.
Everything that must outlive the machine is in the bucket (checkpoint_store.py); this file need not.

One server writes the file. Each start increments `generation`; a server that finds a newer one has been replaced and
writes nothing more (ReplacedError).
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from raycheck.errors import ConfigError

logger = logging.getLogger("raycheck.tinker")
T = TypeVar("T")
VERSION = 1
RETRY_S = 1.0
"""How long to wait before a failed write is retried."""
MUTATES = ("forward_backward", "optim_step", "load_weights")
"""The kinds of request that change an open model."""
SAMPLING_LANE = "sampling"
"""The lane of sampling requests without a sampling session, which no session's end deletes."""
KEPT_SAMPLES = 10_000
"""How many results of that lane to keep. One SDK client waits for at most 2000 at a time."""
PASSES = ("forward_backward", "lost")
"""The kinds of request that a step depends on. A lost request may have been one."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS server (version INTEGER NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, seen_at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, status TEXT NOT NULL, facts TEXT NOT NULL, used_at REAL NOT NULL,
    covered INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL,
    body BLOB, status TEXT NOT NULL, form TEXT, result BLOB, told INTEGER, UNIQUE (lane, seq));
CREATE INDEX IF NOT EXISTS pending ON requests (lane, status);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS keys (key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, at REAL NOT NULL, status INTEGER NOT NULL, body TEXT NOT NULL);
"""

RequestStatus = Literal["pending", "done", "failed"]


class ReplacedError(Exception):
    """Another server has since been started with this file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRequest:
    """One request.

    lane, seq: its model or sampling session, and its number there. kind: the route. digest: of the body, to recognize a
    repeated request. body: as received; None once it is no longer needed. form: the form of `result`: "json", "error"
    (the text and category of a failure), "no_step" (an error for a step that was answered without being made, which a
    replay must not make either), "refusal" (for a malformed request), or one of wire.results.FORMS.
    """

    id: str
    lane: str
    seq: int
    kind: str
    digest: str
    body: bytes | None
    status: RequestStatus
    form: str | None = None
    result: bytes | None = None


class Journal:
    """The state file, created if missing. Raises ConfigError for a file of another version or kind."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            place = Path(path).absolute()
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(mode=0o600)  # it may hold the key, and it holds clients' training data
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
            self._db.execute("BEGIN IMMEDIATE")
            _add_told(self._db)
            found = self._db.execute("SELECT version, generation FROM server").fetchone()
            if found is None:
                self._db.execute("INSERT INTO server VALUES (?, 0)", (VERSION,))
                found = (VERSION, 0)
            if found[0] != VERSION:
                raise ConfigError(f"{path}: written by another version of this server; use another file")
            self.generation: int = found[1] + 1
            self._db.execute("UPDATE server SET generation = ?", (self.generation,))
            self._db.execute("COMMIT")
        except (OSError, sqlite3.OperationalError) as error:
            text = f"state={path}: cannot be opened or written ({error}); make room, grant access, or use another"
            raise ConfigError(text) from error
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path}: not a state file of this server ({error}); use another file") from error

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction. Raises ReplacedError before the block if a newer server has the file."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._check_generation()
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on disk errors SQLite ends it in some cases only
                self._db.execute("ROLLBACK")
            raise

    def _check_generation(self) -> None:
        if self._db.execute("SELECT generation FROM server").fetchone()[0] != self.generation:
            raise ReplacedError("another server was started with this state file; this one must stop")

    def check_current(self) -> None:
        """Raises ReplacedError if a newer server has the file."""
        with self.writing():
            pass

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT."""
        return self._db.execute(query, values).fetchall()

    def kept_key(self, new: str) -> str:
        """Return the key stored in this file by an earlier start, or store `new`, so that clients can continue after a
        restart. Raises ConfigError for a file whose permissions cannot be changed."""
        for path in (self._path, f"{self._path}-wal", f"{self._path}-shm"):  # SQLite may have made the last two
            try:
                Path(path).chmod(0o600)
            except FileNotFoundError:
                continue
            except OSError as error:
                text = f"--state {path}: cannot be made private ({error}) and would contain the key"
                raise ConfigError(f"{text}; use a file that you own, or pass the key with --api-key-file") from None
        with self.writing() as db:
            db.execute("INSERT INTO keys SELECT ? WHERE NOT EXISTS (SELECT 1 FROM keys)", (new,))
        return str(self.rows("SELECT key FROM keys")[0][0])

    def answer_to(self, key: str) -> tuple[int, str] | None:
        """Return the status and body of a recent answer to this idempotency key, or None."""
        found = self.rows("SELECT status, body FROM answers WHERE key = ?", key)
        return None if not found else (found[0][0], found[0][1])

    def remember_answer(self, key: str, status: int, body: str, *, keep_s: float) -> None:
        now = time.time()
        with self.writing() as db:
            db.execute("DELETE FROM answers WHERE at < ?", (now - keep_s,))
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (key, now, status, body))

    def submit(self, request: LoggedRequest) -> LoggedRequest:
        """Log a request. If its model already has a request with this seq, return that one instead."""
        with self.writing() as db:
            known = self.request_at(request.lane, request.seq)
            if known is not None:
                return known
            _insert(db, request)
            db.execute("UPDATE models SET used_at = ? WHERE id = ?", (time.time(), request.lane))
        return request

    def create_model(self, request: LoggedRequest, *, session: str, facts: str, at: float) -> None:
        """Log a training run and its first request atomically."""
        with self.writing() as db:
            db.execute("INSERT INTO models VALUES (?, ?, 'live', ?, ?, 0)", (request.lane, session, facts, at))
            _insert(db, request)

    def finish(self, request_id: str, status: RequestStatus, form: str, result: bytes) -> None:
        """Log a result. The body is kept while a replay may need it: see `cover`. A model whose first request failed is
        unloaded."""
        keeps = MUTATES if status == "done" else ()
        values = (status, form, result, *keeps, request_id)
        marks = ", ".join("?" for _ in keeps)
        body = f"CASE WHEN kind IN ({marks}) THEN body END"
        with self.writing() as db:
            db.execute(f"UPDATE requests SET status = ?, form = ?, result = ?, body = {body} WHERE id = ?", values)  # noqa: S608
            if status == "failed":
                created = "(SELECT lane FROM requests WHERE id = ? AND seq = 0)"
                db.execute(f"UPDATE models SET status = 'unloaded' WHERE id = {created}", (request_id,))  # noqa: S608

    async def log_result(self, request_id: str, form: str, result: bytes) -> None:
        """Log the result of a request that has run, as soon as the disk has room."""
        status: RequestStatus = "failed" if form == "error" else "done"
        await when_there_is_room(lambda: self.finish(request_id, status, form, result))

    def unload(self, model: str) -> None:
        """Record that a model is unloaded for good."""
        with self.writing() as db:
            db.execute("UPDATE models SET status = 'unloaded' WHERE id = ?", (model,))

    def cover(self, model: str, seq: int) -> None:
        """Record that a checkpoint in the bucket covers the requests up to `seq`, and delete their bodies."""
        with self.writing() as db:
            db.execute("UPDATE models SET covered = max(covered, ?) WHERE id = ?", (seq, model))
            db.execute("UPDATE requests SET body = NULL WHERE lane = ? AND seq <= ?", (model, seq))

    def forget(self, *, before: float) -> None:
        """Delete sessions that ended before this time, with their training runs, and the oldest results of sampling
        without a session. Checkpoints are not affected: they are not in this file."""
        with self.writing() as db:
            over = "SELECT id FROM sessions WHERE status != 'active' AND seen_at < ?"
            runs = f"SELECT id FROM models WHERE session IN ({over})"  # noqa: S608  no value is in the text
            db.execute(f"DELETE FROM requests WHERE lane IN ({runs})", (before,))  # noqa: S608
            db.execute(f"DELETE FROM models WHERE session IN ({over})", (before,))  # noqa: S608
            db.execute("DELETE FROM sessions WHERE status != 'active' AND seen_at < ?", (before,))
            db.execute(
                "DELETE FROM requests WHERE lane = ? AND status != 'pending' AND seq <= ?",
                (SAMPLING_LANE, self.next_seq(SAMPLING_LANE) - 1 - KEPT_SAMPLES),
            )

    def add_sampler(self, session: str, number: int, facts: str) -> str:
        """Log a sampling session and return its id. An existing one keeps its facts."""
        sampler = f"{session}_sample_{number}"
        with self.writing() as db:
            db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", (sampler, session, facts))
        return sampler

    def uncovered(self, model: str) -> int:
        """Return how many of a model's steps are in no checkpoint."""
        query = (
            "SELECT count(*) FROM requests WHERE lane = ? AND kind = 'optim_step' AND status = 'done' "
            "AND body IS NOT NULL"
        )
        return int(self.rows(query, model)[0][0])

    def request(self, request_id: str) -> LoggedRequest | None:
        return next(self._requests("WHERE id = ?", request_id), None)

    def request_at(self, lane: str, seq: int) -> LoggedRequest | None:
        return next(self._requests("WHERE lane = ? AND seq = ?", lane, seq), None)

    def next_seq(self, lane: str) -> int:
        """Return the lane's highest number so far plus 1."""
        return int(self.rows("SELECT coalesce(max(seq), -1) + 1 FROM requests WHERE lane = ?", lane)[0][0])

    def first_pending(self, lane: str, *, after: int = -1) -> LoggedRequest | None:
        """Return the lowest-numbered request after `after` that has no result."""
        where = "WHERE lane = ? AND seq > ? AND status = 'pending' ORDER BY seq LIMIT 1"
        return next(self._requests(where, lane, after), None)

    def missing_before(self, lane: str, seq: int) -> list[int]:
        """Return the lower numbers that have not arrived yet."""
        found = {row[0] for row in self.rows("SELECT seq FROM requests WHERE lane = ? AND seq < ?", lane, seq)}
        return [] if len(found) == seq else [number for number in range(seq) if number not in found]

    def newest_change(self, model: str, before: int) -> int:
        """Return the number of the newest step or load before `before`, or 0 if there is none.

        Passes since then have accumulated gradients, which no checkpoint contains.
        """
        query = (
            "SELECT coalesce(max(seq), 0) FROM requests WHERE lane = ? AND seq < ? AND status = 'done' "
            "AND kind IN ('optim_step', 'load_weights')"
        )
        return int(self.rows(query, model, before)[0][0])

    def tell(self, request: LoggedRequest) -> None:
        """Record that the client now knows of a failed pass, and sends its later requests knowing it."""
        if request.status == "failed" and request.kind in PASSES:
            with self.writing() as db:
                query = "UPDATE requests SET told = ? WHERE id = ? AND told IS NULL"
                db.execute(query, (self.next_seq(request.lane), request.id))

    def untold_failure(self, model: str, step: int) -> LoggedRequest | None:
        """Return a failed or missing pass between the last step and number `step` that the client did not yet know of
        when it sent that step. A refused or failed step does not count as the last step."""
        query = (
            "SELECT coalesce(max(seq), 0) FROM requests WHERE lane = ? AND seq < ? AND kind = 'optim_step' "
            "AND status = 'done'"
        )
        ((last,),) = self.rows(query, model, step)
        where = (
            "WHERE lane = ? AND seq > ? AND seq < ? AND form = 'error' AND (told IS NULL OR told > ?) "
            "AND kind IN (?, ?) ORDER BY seq LIMIT 1"
        )
        return next(self._requests(where, model, last, step, step, *PASSES), None)

    def to_replay(self, model: str, after: int) -> list[LoggedRequest]:
        """Return the requests after `after` that changed the model, in order."""
        kinds = ", ".join("?" for _ in MUTATES)
        query = f"WHERE lane = ? AND seq > ? AND status = 'done' AND kind IN ({kinds}) ORDER BY seq"
        return list(self._requests(query, model, after, *MUTATES))

    def _requests(self, where: str, *values: object) -> Iterator[LoggedRequest]:
        columns = "id, lane, seq, kind, digest, body, status, form, result"
        for row in self.rows(f"SELECT {columns} FROM requests {where}", *values):  # noqa: S608  no value is in the text
            yield LoggedRequest(**dict(zip(columns.split(", "), row, strict=True)))


def _add_told(db: sqlite3.Connection) -> None:
    """Add the column that an older server's file lacks: the number after those received when the client was first told
    of a failure."""
    if not any(column[1] == "told" for column in db.execute("PRAGMA table_info(requests)")):
        db.execute("ALTER TABLE requests ADD COLUMN told INTEGER")


def _insert(db: sqlite3.Connection, request: LoggedRequest) -> None:
    values = (request.id, request.lane, request.seq, request.kind, request.digest, request.body)
    db.execute(
        "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
        (*values, request.status, request.form, request.result),
    )


async def when_there_is_room(write: Callable[[], T]) -> T:
    """Retry a write to the journal until it succeeds, and return its result.

    For events that have already happened and must be recorded: they can neither be refused nor repeated.
    """
    while True:
        try:
            return write()
        except sqlite3.OperationalError as error:
            logger.warning("the state file cannot be written; retrying: %s", error)
            await asyncio.sleep(RETRY_S)
