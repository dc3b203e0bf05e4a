"""The server without HTTP: sessions, training runs, and every request from its arrival to its result."""

import asyncio
import hashlib
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from raycheck.tinker.checkpoint_paths import CheckpointPath, run_id_of
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.engine.actor import Engine, EngineGoneError
from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.engine.orders import BaseFacts, LoadSource
from raycheck.tinker.journal import Journal, LoggedRequest, ReplacedError, when_there_is_room
from raycheck.tinker.model_queue import ModelQueue, failure
from raycheck.tinker.models import ModelFacts, shape_in_note
from raycheck.tinker.operations import Context, asked_in, other_base, source_of
from raycheck.tinker.wire.fields import (
    RefusedRequestError,
    dict_in,
    flag_in,
    metadata_in,
    number_in,
    optional_number_in,
    optional_text_in,
    tags_in,
    text_in,
)

logger = logging.getLogger("raycheck.tinker")
MAX_SEED = 1 << 32
KEPT_S = 7 * 24 * 3600.0
"""How long an ended session stays in the state file, with its training runs."""
MAX_AHEAD = 1000
"""How many earlier numbers may be missing: the SDK sends the parts of a batch concurrently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of the server.

    base_model: the clients' name for the base model.
    hold_s: how long a request waits for a missing earlier one; the SDK itself retries a request for five minutes.
    recovery_steps, recovery_s: after how many steps, and how many seconds, a model that was not saved gets a recovery
    save.
    session_timeout_s: how long a session may be silent before it ends and its models are unloaded; None: forever.
    cleanup_s: how often that is checked.
    direct_downloads: files are downloaded from the bucket by URLs signed with its credentials.
    max_models: how many models may be loaded at a time; each has a process that commits its checkpoints.
    """

    base_model: str
    hold_s: float = 330.0
    recovery_steps: int = 200
    recovery_s: float = 60.0
    session_timeout_s: float | None = 300.0
    cleanup_s: float = 60.0
    direct_downloads: bool = False
    max_models: int = 32


class Service:
    """The request handler. replaced: set when another server has been started with the same state file."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        journal: Journal,
        engine: Engine,
        checkpoints: CheckpointStore,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.checkpoints = checkpoints
        self.engine = engine
        self.base: BaseFacts | None = None
        self.replaced = asyncio.Event()
        self._queues: dict[str, ModelQueue] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self._cleaner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the engine, and resume what the last server left pending."""
        self.base = await self.engine.call("facts")
        with self.journal.writing() as db:
            db.execute("UPDATE sessions SET seen_at = ? WHERE status = 'active'", (time.time(),))
        for run, facts in self.journal.rows("SELECT id, facts FROM models WHERE status = 'live'"):
            self._start_queue(run, ModelFacts.parse(facts))
        self._cleaner = asyncio.create_task(self._clean_up())

    async def stop(self) -> None:
        if self._cleaner is not None:
            self._cleaner.cancel()
        for queue in self._queues.values():
            await queue.stop()
        self.journal.close()

    # Sessions

    def create_session(self, body: Mapping[str, Any]) -> str:
        session = f"session_{uuid4().hex[:16]}"
        kept: dict[str, object] = {"tags": tags_in(body), "user_metadata": metadata_in(body)}
        kept |= {name: optional_text_in(body, name) for name in ("sdk_version", "display_name") if body.get(name)}
        with self.journal.writing() as db:
            db.execute("INSERT INTO sessions VALUES (?, 'active', ?, ?)", (session, time.time(), json.dumps(kept)))
        return session

    def heartbeat(self, session: str) -> None:
        """Record a session's heartbeat. Raises RefusedRequestError: 404 for an unknown one, 410 for an ended one."""
        self.check_session(session)
        with self.journal.writing() as db:
            db.execute("UPDATE sessions SET seen_at = ? WHERE id = ?", (time.time(), session))

    def check_session(self, session: str) -> None:
        found = self.journal.rows("SELECT status FROM sessions WHERE id = ?", session)
        if not found:
            raise RefusedRequestError(f"there is no session {session}", 404)
        if found[0][0] != "active":
            raise RefusedRequestError(f"session {session} is over ({found[0][0]}); start a new one", 410)

    async def end_session(self, session: str, status: str) -> None:
        """End a session and unload its models; checkpoints stay. Raises RefusedRequestError for an unknown session."""
        with suppress(RefusedRequestError):
            self.check_session(session)
            for (run,) in self.journal.rows("SELECT id FROM models WHERE session = ? AND status = 'live'", session):
                await self.unload(run)
            with self.journal.writing() as db:
                db.execute("UPDATE sessions SET status = ?, seen_at = ? WHERE id = ?", (status, time.time(), session))
                for table in ("models", "samplers"):
                    of_session = f"SELECT id FROM {table} WHERE session = ?"  # noqa: S608  one of two names
                    query = f"DELETE FROM requests WHERE status != 'pending' AND lane IN ({of_session})"  # noqa: S608
                    db.execute(query, (session,))
                db.execute("DELETE FROM samplers WHERE session = ?", (session,))
            return
        if not self.journal.rows("SELECT 1 FROM sessions WHERE id = ?", session):
            raise RefusedRequestError(f"there is no session {session}", 404)

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(self.settings.cleanup_s)
            for session in self._silent_sessions():
                logger.info("session timed out, unloading its models session=%s", session)
                try:
                    await self.end_session(session, "expired")
                except ReplacedError:
                    self.replaced.set()
                except Exception:
                    logger.exception("could not end a session; will retry session=%s", session)
            try:
                self.journal.forget(before=time.time() - KEPT_S)
            except ReplacedError:
                self.replaced.set()
            except sqlite3.OperationalError as error:
                logger.warning("could not delete old rows of the state file; will retry: %s", error)

    def _silent_sessions(self) -> list[str]:
        if self.settings.session_timeout_s is None:
            return []
        query = "SELECT id FROM sessions WHERE status = 'active' AND seen_at < ?"
        return [session for (session,) in self.journal.rows(query, time.time() - self.settings.session_timeout_s)]

    # Training runs

    def create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Create a training run with a newly initialized adapter. Returns the request's id and the run's."""
        if (role := body.get("model_role") or "policy") != "policy":
            raise RefusedRequestError(f"model_role={str(role)[:100]!r}: models of this server have no value head", 422)
        lora = dict_in(body, "lora_config")
        seed = optional_number_in(lora, "seed")
        try:
            shape = LoraShape(
                rank=number_in(lora, "rank"),
                seed=draw_seed() if seed is None else seed,
                **{name: flag_in(lora, name, default=True) for name in ("train_attn", "train_mlp", "train_unembed")},
            )
        except ValueError as error:
            raise RefusedRequestError(str(error), 422) from None
        base_model = text_in(body, "base_model")
        self.check_base(base_model)
        return self._create(body, shape, kind="create_model", base_model=base_model)

    async def load_new_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Create a training run from a checkpoint: a load_weights with a session instead of a model."""
        if body.get("base_model") is not None:
            self.check_base(text_in(body, "base_model"))
        run = run_id_of(text_in(body, "session_id"), number_in(body, "model_seq_id"))
        if (known := self.journal.request_at(run, 0)) is not None:  # its source may have been deleted in the meantime
            return self._repeated(known, "load_weights", canonical(body)), run
        try:
            path = CheckpointPath.parse(text_in(body, "path"))
            source = await asyncio.to_thread(source_of, self.checkpoints, self.base_facts, body)
            note = (await asyncio.to_thread(self.checkpoints.find, path)).note
            shape = shape_in_note(note)
        except ValueError as error:
            raise RefusedRequestError(str(error)) from None
        name = body.get("base_model") or str(note["base_model"])
        return self._create(body, shape, kind="load_weights", base_model=name, source=source)

    def _create(
        self,
        body: Mapping[str, Any],
        shape: LoraShape,
        *,
        kind: str,
        base_model: str,
        source: LoadSource | None = None,
    ) -> tuple[str, str]:
        """Log a training run, unless it exists. Returns the request's id and the run's."""
        session, number = text_in(body, "session_id"), number_in(body, "model_seq_id")
        optimizer = dict_in(body, "optimizer_config").get("type", "adamw")
        if optimizer != "adamw":
            raise RefusedRequestError(f"optimizer_config.type={optimizer!r}: this server supports adamw only", 422)
        self.check_session(session)
        run = run_id_of(session, number)
        facts = ModelFacts(
            session=session,
            number=number,
            base_model=base_model,
            shape=shape,
            metadata={**self._metadata_of(session), **metadata_in(body)},
            source=source,
            source_path=None if source is None else str(body["path"]),
            created_at=time.time(),
        )
        digest = canonical(body)
        if (known := self.journal.request_at(run, 0)) is not None:
            return self._repeated(known, kind, digest), run
        self._check_room()
        request = LoggedRequest(id=uuid4().hex, lane=run, seq=0, kind=kind, digest=digest, body=b"", status="pending")
        self.journal.create_model(request, session=session, facts=facts.text, at=facts.created_at)
        self._start_queue(run, facts)
        return request.id, run

    def _check_room(self) -> None:
        ((loaded,),) = self.journal.rows("SELECT count(*) FROM models WHERE status = 'live'")
        if loaded >= self.settings.max_models:
            raise RefusedRequestError(
                f"{loaded} models are loaded, and this server accepts no more (--max-models): unload one, end its "
                "session, or wait until an inactive session has ended"
            )

    def _metadata_of(self, session: str) -> dict[str, str]:
        """Return a session's metadata, which its training runs share."""
        ((text,),) = self.journal.rows("SELECT body FROM sessions WHERE id = ?", session)
        return metadata_in(json.loads(text))

    def facts_of(self, run: str) -> ModelFacts:
        """Return the facts of a run of this server. Raises RefusedRequestError (404) for any other run."""
        found = self.journal.rows("SELECT facts FROM models WHERE id = ?", run)
        if not found:
            raise RefusedRequestError(f"there is no model {run}", 404)
        return ModelFacts.parse(found[0][0])

    def runs_here(self, run: str | None = None) -> dict[str, tuple[ModelFacts, float]]:
        """Return the facts of this server's runs (or of one) and the time of each one's last request, newest first."""
        where = "" if run is None else "WHERE id = ?"
        rows = self.journal.rows(
            f"SELECT id, facts, used_at FROM models {where} ORDER BY used_at DESC",  # noqa: S608  no value is in it
            *([] if run is None else [run]),
        )
        return {found: (ModelFacts.parse(facts), used_at) for found, facts, used_at in rows}

    async def unload(self, run: str) -> None:
        """Unload a model for good. Requests that wait for it fail."""
        queue = self._queues.pop(run, None)
        if queue is not None:
            await queue.stop()
        with suppress(EngineGoneError):
            await self.engine.call("close", run)
        await when_there_is_room(lambda: self.journal.unload(run))
        while (request := self.journal.first_pending(run)) is not None:
            text = f"model {run} was unloaded"
            await self.journal.log_result(request.id, *failure(text, "user"))
            self.wake(request.id)

    def _start_queue(self, run: str, facts: ModelFacts) -> None:
        context = Context(
            run=run,
            facts=facts,
            base=self.base_facts,
            engine=self.engine,
            journal=self.journal,
            checkpoints=self.checkpoints,
        )
        self._queues[run] = ModelQueue(
            context,
            hold_s=self.settings.hold_s,
            recovery_steps=self.settings.recovery_steps,
            recovery_s=self.settings.recovery_s,
            on_result=self.wake,
            on_replaced=self.replaced.set,
        )

    @property
    def base_facts(self) -> BaseFacts:
        assert self.base is not None, "start() has queried the engine"
        return self.base

    def check_base(self, name: str) -> None:
        if name != self.settings.base_model:
            raise RefusedRequestError(f"base_model={name!r}: this server offers {self.settings.base_model!r} only", 422)

    def check_fingerprint(self, what: str, note: Mapping[str, Any]) -> None:
        """Raises RefusedRequestError for a checkpoint of another base model."""
        if note.get("base_fingerprint") != self.base_facts.fingerprint:
            raise RefusedRequestError(f"{what}: {other_base(note)}")

    # Requests to a model

    def submit(
        self, kind: str, run: str, seq: int | None, body: bytes, *, digest: str, problem: str | None = None
    ) -> str:
        """Log a request to a model. Returns its id, or that of an identical earlier request.

        problem: why the request cannot run; it then only occupies its number. Raises RefusedRequestError in that case,
        for a model that does not exist, and for a number already used by another request.
        """
        rows = self.journal.rows("SELECT status FROM models WHERE id = ?", run)
        if not rows:
            raise RefusedRequestError(f"there is no model {run}", 404)
        if rows[0][0] != "live":
            raise RefusedRequestError(f"model {run} was unloaded; create a new one from one of its checkpoints", 404)
        if seq is not None and not 1 <= seq < self.journal.next_seq(run) + MAX_AHEAD:
            raise RefusedRequestError(f"seq_id={seq}: numbers start with 1 and are consecutive", 422)
        request = LoggedRequest(
            id=uuid4().hex,
            lane=run,
            seq=self.journal.next_seq(run) if seq is None else seq,
            kind=kind,
            digest=digest,
            body=body,
            status="pending",
        )
        if problem is not None:
            form, result = "refusal", problem.encode()
            request = replace(request, body=None, status="failed", form=form, result=result)
        known = self.journal.submit(request)
        queue = self._queues.get(run)
        if queue is not None:
            queue.wake()
        return self._repeated(known, kind, digest)

    def _repeated(self, known: LoggedRequest, kind: str, digest: str) -> str:
        """Return the id of the request logged under this number. Raises RefusedRequestError if it is a different
        request, or if it was refused."""
        if known.kind == "lost":
            self.journal.tell(known)
            raise RefusedRequestError(f"request {known.seq} of {known.lane} arrived too late: it was given up")
        if (known.kind, known.digest) != (kind, digest):
            raise RefusedRequestError(
                f"request {known.seq} of {known.lane} was sent before with different content ({known.kind})"
            )
        if known.form == "refusal":
            raise RefusedRequestError((known.result or b"").decode(), 422)
        return known.id

    def submit_json(self, kind: str, body: Mapping[str, Any]) -> str:
        """Log a request whose body is JSON. See submit."""
        run, seq, data = text_in(body, "model_id"), optional_number_in(body, "seq_id"), json.dumps(body).encode()
        problem = self.problem_of(kind, data)
        if problem is None and kind == "load_weights" and seq != 1:
            problem = (
                f"LoadWeights is not permitted with seq_id {seq}: load a model before any other request to it. Use "
                "create_training_client_from_state"
            )
        return self.submit(kind, run, seq, data, digest=canonical(body), problem=problem)

    def problem_of(self, kind: str, body: bytes) -> str | None:
        """Return why a request to a model cannot run, or None if nothing in its body prevents it."""
        try:
            asked_in(kind, body, self.base_facts)
        except (RefusedRequestError, ValueError) as error:
            return str(error)
        return None

    async def result_of(self, request_id: str, *, wait_s: float) -> LoggedRequest:
        """Return a request once it has a result, or without one after `wait_s` seconds. Raises RefusedRequestError
        (404) for an unknown request."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            came = self._waiting.setdefault(request_id, asyncio.Event())
            request = self.journal.request(request_id)
            left = deadline - asyncio.get_running_loop().time()
            if request is None or request.status != "pending" or left <= 0:
                if request is None or request.status != "pending":
                    self._waiting.pop(request_id, None)
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), left)
        if request is None:
            raise RefusedRequestError(f"there is no request {request_id}", 404)
        with suppress(sqlite3.OperationalError):  # a full disk: then a step may be refused that could have been made
            self.journal.tell(request)
        return request

    def wake(self, request_id: str) -> None:
        """Wake those waiting for a result that is now logged."""
        came = self._waiting.pop(request_id, None)
        if came is not None:
            came.set()


def draw_seed() -> int:
    """Return a seed for a model if the client gives none."""
    return secrets.randbelow(MAX_SEED)


def canonical(body: Mapping[str, Any]) -> str:
    """Return a digest of a JSON body that does not depend on the order of its fields."""
    return digest_of(json.dumps(body, sort_keys=True).encode())


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
