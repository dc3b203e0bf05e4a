"""Sampling sessions and their requests, which are logged like requests to models but run in any order.

A sampling session names weights: the base model's, or those of a checkpoint in the bucket. Its requests change nothing,
so when the engine or the server has died they are simply run again with the same seed.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from raycheck.errors import RaycheckError
from raycheck.tinker.checkpoint_paths import CheckpointPath
from raycheck.tinker.engine.actor import EngineGoneError, EngineRefusalError
from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.engine.orders import LoadSource, SampleOrder
from raycheck.tinker.journal import SAMPLING_LANE, LoggedRequest
from raycheck.tinker.model_queue import MAX_DEATHS, failure
from raycheck.tinker.models import SamplerFacts, shape_in_note
from raycheck.tinker.service import Service, canonical, draw_seed
from raycheck.tinker.wire.fields import RefusedRequestError, dict_in, flag_in, number_in, optional_number_in, text_in
from raycheck.tinker.wire.samples import SampleOutput, TargetCells, sample_in_protobuf
from raycheck.tinker.wire.tensors import MalformedDataError, cells_in_json

logger = logging.getLogger("raycheck.tinker")
MAX_SAMPLES = 1024
MAX_STOPS = 16
MAX_LIKELIEST = 256
MAX_LIKELIEST_CELLS = 1 << 24
"""The maximum number of most likely tokens in one answer. Each takes eight bytes, in memory, in a protobuf message, and
in the state file."""
NOT_THERE = ("prompt_alt_tokens_k", "record_stability_info")


class Sampling:
    """The handler of sampling requests. service: stores the requests and has the models' facts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Resume the requests that the last server left pending."""
        query = "SELECT id FROM requests WHERE kind = 'sample' AND status = 'pending'"
        for (request_id,) in self._service.journal.rows(query):
            request = self._service.journal.request(request_id)
            assert request is not None, "its id was just read"
            self._run(request)

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def create_session(self, body: Mapping[str, Any]) -> str:
        """Create a sampling session for the base model or a checkpoint, or find the same one. Returns its id."""
        session, number = text_in(body, "session_id"), number_in(body, "sampling_session_seq_id")
        self._service.check_session(session)
        facts = await self._facts_in(body)
        return self._service.journal.add_sampler(session, number, facts.text)

    async def _facts_in(self, body: Mapping[str, Any]) -> SamplerFacts:
        """Return the weights named by base_model or model_path in a body."""
        base_model, path = body.get("base_model"), body.get("model_path")
        if path is not None:
            return await asyncio.to_thread(self._facts_of_path, CheckpointPath.parse(text_in(body, "model_path")))
        if base_model is None:
            raise RefusedRequestError("give base_model or model_path: the weights to sample from")
        self._service.check_base(text_in(body, "base_model"))
        return SamplerFacts(base_model=str(base_model))

    def _facts_of_path(self, path: CheckpointPath) -> SamplerFacts:
        found = self._service.checkpoints.find(path)
        self._service.check_fingerprint(path.text, found.note)
        try:
            shape = shape_in_note(found.note)
        except ValueError as error:
            raise RefusedRequestError(str(error)) from None
        return SamplerFacts(
            base_model=str(found.note["base_model"]),
            model_path=path.text,
            source=LoadSource(uri=found.uri, key=found.key, with_optimizer=False),
            shape=shape,
        )

    def facts_of(self, sampler: str) -> SamplerFacts:
        """Return the weights of a sampling session. Raises RefusedRequestError (404) for an unknown one."""
        found = self._service.journal.rows("SELECT facts FROM samplers WHERE id = ?", sampler)
        if not found:
            raise RefusedRequestError(f"there is no sampling session {sampler}", 404)
        return SamplerFacts.parse(found[0][0])

    async def submit(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """Log a sampling request and start it.

        Returns its id, or that of an identical earlier request, and the number of sequences.
        """
        journal = self._service.journal
        if body.get("sampling_session_id") is not None:
            lane, seq = text_in(body, "sampling_session_id"), optional_number_in(body, "seq_id")
            facts = self.facts_of(lane)
        else:
            lane, seq, facts = SAMPLING_LANE, None, await self._facts_in(body)
        order = self._order_in(body, facts)
        request = LoggedRequest(
            id=uuid4().hex,
            lane=lane,
            seq=journal.next_seq(lane) if seq is None else seq,
            kind="sample",
            digest=canonical(body),
            body=json.dumps(asdict(order)).encode(),
            status="pending",
        )
        known = journal.submit(request)
        if known is request:
            self._run(request)
        elif known.digest != request.digest:
            raise RefusedRequestError(f"request {seq} of {lane} was sent before with different content")
        return known.id, order.num_samples

    def _run(self, request: LoggedRequest) -> None:
        task = asyncio.create_task(self._result(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _result(self, request: LoggedRequest) -> None:
        order = order_in(request.body or b"{}")
        form, result = failure(f"the engine died {MAX_DEATHS} times while sampling", "server")
        deaths = 0
        while deaths < MAX_DEATHS:
            try:
                output: SampleOutput = await self._service.engine.call("sample", order)
                form, result = "sample", sample_in_protobuf(output, order.targets)
            except EngineGoneError as error:
                deaths += error.was_running
                continue
            except EngineRefusalError as error:
                form, result = failure(str(error), error.category)
            except RaycheckError as error:
                form, result = failure(str(error), "server")
            except Exception as error:
                logger.exception("request failed: kind=sample lane=%s", request.lane)
                form, result = failure(f"{type(error).__name__}: {error}", "server")
            break
        await self._service.journal.log_result(request.id, form, result)
        self._service.wake(request.id)

    def _order_in(self, body: Mapping[str, Any], facts: SamplerFacts) -> SampleOrder:
        """Return the order in a body. Raises RefusedRequestError for an invalid one."""
        for name in NOT_THERE:
            if body.get(name):
                raise RefusedRequestError(f"{name}: this server does not support it", 422)
        prompt = self._prompt_in(body)
        params = dict_in(body, "sampling_params")
        base = self._service.base_facts
        room = base.max_tokens - len(prompt) if base.max_tokens else 1 << 20
        wanted = optional_number_in(params, "max_tokens")
        count = 1 if body.get("num_samples") is None else number_in(body, "num_samples")
        seed = optional_number_in(params, "seed")
        if not 1 <= count <= MAX_SAMPLES or wanted == 0 or room < 1:
            raise RefusedRequestError(
                f"num_samples={count}, max_tokens={wanted}, and a prompt of {len(prompt)} tokens: request 1 to "
                f"{MAX_SAMPLES} samples of at least one token, with a prompt that leaves room for it",
                422,
            )
        max_tokens = room if wanted is None else min(wanted, room)
        likeliest_prompt = self._likeliest_in(body, "topk_prompt_logprobs")
        likeliest_sampled = self._likeliest_in(body, "topk_sample_logprobs")
        _check_likeliest(len(prompt) * likeliest_prompt, count * max_tokens * likeliest_sampled)
        stop_tokens, stop_strings = _stops_in(params)
        is_scored = flag_in(body, "prompt_logprobs", default=False)
        return SampleOrder(
            source=facts.source,
            shape=facts.shape,
            prompt=prompt,
            num_samples=count,
            max_tokens=max_tokens,
            seed=draw_seed() if seed is None else seed,
            temperature=_float_in(params, "temperature", default=1.0, least=0.0, most=100.0),
            top_k=_top_k_in(params),
            top_p=_float_in(params, "top_p", default=1.0, least=1e-6, most=1.0),
            stop_tokens=stop_tokens,
            stop_strings=stop_strings,
            prompt_logprobs=is_scored,
            scored_last=_scored_last_in(body, len(prompt), is_scored=is_scored),
            likeliest_prompt=likeliest_prompt,
            likeliest_sampled=likeliest_sampled,
            targets=self._targets_in(body, len(prompt)),
        )

    def _likeliest_in(self, body: Mapping[str, Any], name: str) -> int:
        most = min(MAX_LIKELIEST, self._service.base_facts.vocab_size)
        value = optional_number_in(body, name) or 0
        if value > most:
            raise RefusedRequestError(f"{name}={value}: give at most {most}", 422)
        return value

    def _targets_in(self, body: Mapping[str, Any], prompt_length: int) -> TargetCells | None:
        given = body.get("target_prompt_logprobs")
        if given is None:
            return None
        try:
            cells = cells_in_json("target_prompt_logprobs", given)
        except MalformedDataError as error:
            raise RefusedRequestError(str(error), 422) from None
        vocabulary = self._service.base_facts.vocab_size
        is_whole = cells.values.dtype.kind == "i" and ((cells.values >= -1) & (cells.values < vocabulary)).all()
        if len(cells.shape) != 2 or cells.shape[0] != prompt_length - 1 or not is_whole:
            raise RefusedRequestError(
                f"target_prompt_logprobs has the shape {list(cells.shape)}: give a row of tokens, or of -1, for each "
                f"of the {prompt_length} prompt tokens except the first",
                422,
            )
        named = {"tokens": cells.values, "rows": cells.rows(), "crow": cells.crow, "col": cells.col}
        plain = {name: None if values is None else values.tolist() for name, values in named.items()}
        return TargetCells.parse({"shape": cells.shape, **plain})

    def _prompt_in(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        chunks = dict_in(body, "prompt").get("chunks")
        tokens: list[int] = []
        for chunk in chunks if isinstance(chunks, list) else []:
            found = chunk.get("tokens") if isinstance(chunk, dict) else None
            if not isinstance(found, list) or any(type(token) is not int for token in found):
                raise RefusedRequestError("prompt: this server accepts chunks of tokens only", 422)
            tokens += found
        base = self._service.base_facts
        if not tokens or min(tokens) < 0 or max(tokens) >= base.vocab_size:
            raise RefusedRequestError(f"prompt: give tokens of the vocabulary of {base.vocab_size}", 422)
        return tuple(tokens)


def order_in(data: bytes) -> SampleOrder:
    """Return the order stored in a logged request."""
    given = json.loads(data)
    source, shape, stop_tokens = given.pop("source"), given.pop("shape"), given.pop("stop_tokens")
    targets = given.pop("targets", None)  # missing in an older server's requests
    return SampleOrder(
        **{**given, "prompt": tuple(given["prompt"]), "stop_strings": tuple(given["stop_strings"])},
        source=source and LoadSource(**source),
        shape=shape and LoraShape(**shape),
        stop_tokens=None if stop_tokens is None else tuple(stop_tokens),
        targets=targets and TargetCells.parse(targets),
    )


def _check_likeliest(at_prompt: int, sampled: int) -> None:
    """Raises RefusedRequestError if an answer would contain too many of the most likely tokens."""
    if at_prompt + sampled > MAX_LIKELIEST_CELLS:
        raise RefusedRequestError(
            f"the answer would contain up to {at_prompt} of the most likely tokens for the prompt (its length times "
            f"topk_prompt_logprobs) and {sampled} for the samples (num_samples times max_tokens times "
            f"topk_sample_logprobs): reduce these to at most {MAX_LIKELIEST_CELLS} together",
            422,
        )


def _scored_last_in(body: Mapping[str, Any], prompt_length: int, *, is_scored: bool) -> int | None:
    value = optional_number_in(body, "prompt_logprobs_last_n")
    if value is not None and not (is_scored and 1 <= value < prompt_length):
        raise RefusedRequestError(
            f"prompt_logprobs_last_n={value}: use it with prompt_logprobs, and give 1 to {prompt_length - 1}, since "
            "the first token has no score",
            422,
        )
    return value


def _stops_in(params: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return stop tokens and stop strings. Without `stop` the model's own stop tokens apply, with [] none."""
    given = params.get("stop")
    if given is None:
        return None, ()
    stops = [given] if isinstance(given, str) else given
    if isinstance(stops, list) and len(stops) <= MAX_STOPS:
        if all(isinstance(stop, str) and stop for stop in stops) and stops:
            return None, tuple(stops)
        if all(type(stop) is int and stop >= 0 for stop in stops):
            return tuple(stops), ()
    raise RefusedRequestError(f"sampling_params.stop: give up to {MAX_STOPS} strings or tokens", 422)


def _float_in(params: Mapping[str, Any], name: str, *, default: float, least: float, most: float) -> float:
    value = default if params.get(name) is None else params[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise RefusedRequestError(f"sampling_params.{name}={value!r}: give a number from {least} to {most}", 422)
    return float(value)


def _top_k_in(params: Mapping[str, Any]) -> int:
    value = -1 if params.get("top_k") is None else params["top_k"]
    if type(value) is not int or not (value == -1 or 1 <= value < 1 << 31):
        raise RefusedRequestError(f"sampling_params.top_k={value!r}: give -1 or a number of at least 1", 422)
    return value
