"""Proves a data source before the first step: reads some samples as a trial and compares them.

It makes three comparisons: the samples of all ranks with each other, since Batches expect them to be equal; the samples
of this start with those of the checkpoint; and a stream that was read straight through with the same stream after its
state was restored. All reading is done in forked children, so the source is left unchanged.

Before each sample the random generators are seeded with its number. A sample that still differs from itself (by the
system's randomness, or by the time) is not compared. One that differs under another seed, by random augmentation, is
compared only among the ranks: another release of a library may augment differently.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raycheck.data.isolated_call import TrialError, isolated
from raycheck.data.proof_agreement import SourceProof, shown_numbers
from raycheck.data.sample_seeding import seed_worker
from raycheck.data.shared_streams import OneStream, StreamPlan, StreamState, checksum, known_fault
from raycheck.errors import ConfigError
from raycheck.state.entries.random_generators import generators_in, seed_generator

MAX_SAMPLES = 16
"""How many samples of a source are compared among the ranks and with the checkpoint."""
READ_FOR_S = 2.0
"""How long to read samples; at least one is read."""
MAX_ROWS = 64
"""How many samples of a stream are read to test its state."""
ROWS_FOR_S = 0.5
"""How long to read a stream straight through."""
TRY_FOR_S = 4.0
"""After this time no further trial read of a stream is started; all first restarts come before the second ones."""
CALL_WITHIN_S = 10.0
"""How long one child may take."""
STRIDES = (1, 5, 13)
"""After how many samples a stream's state is taken and restored, at each of its restarts."""
RESTARTS = 3
"""How often a stream is restarted from a state as a trial, after it was read straight through."""


def numbered_proof(dataset: Any, length: int, order: Mapping[str, Any]) -> SourceProof:
    """Read some samples of a map-style dataset as a trial, three times each."""
    proof = SourceProof(kind=type(dataset).__qualname__, order=order)
    try:
        read = isolated(partial(_read_numbered, dataset, _spread(length)), within_s=CALL_WITHIN_S)
    except TrialError as error:
        return replace(proof, said=(f"its samples could not be compared: {error}",))
    return _with_samples(proof, read, wanted=min(length, MAX_SAMPLES))


def stream_proof(dataset: Any, plan: StreamPlan, order: Mapping[str, Any], *, has_state: bool) -> SourceProof:
    """Read the beginning of a stream as a trial, and test whether its state leads back to where it was taken.

    has_state: whether it has a state that seems to be exact.
    """
    proof = SourceProof(kind=type(dataset).__qualname__, order=order)
    fault = known_fault(dataset) if has_state else ""
    whole = replace(plan, streams=1)  # the ranks compare the stream from its beginning, unsharded
    try:
        first, again, other = (_trial_read(dataset, whole, MAX_SAMPLES, salt=salt).rows for salt in (0, 0, 1))
    except TrialError as error:
        said = f"it could not be read as a trial: {error}"
        reason = (fault or said) if has_state else ""
        return replace(proof, is_exact=False if fault else None, reason=reason, said=(said,))
    length = min(map(len, (first, again, other)))
    proof = _with_samples(proof, dict(enumerate(zip(first, again, other, strict=False))), wanted=length)
    if not has_state:
        return proof
    if fault:
        return replace(proof, is_exact=False, reason=fault)
    if len(proof.samples) < length:
        return replace(proof, reason="it gives other samples each time that it is read, so its state cannot be tried")
    is_exact, reason, restarts = _tried_state(dataset, plan)
    if is_exact and restarts < RESTARTS:
        text = (
            f"the proof was cut short: its state was tried over {restarts} of {RESTARTS} restarts in {TRY_FOR_S:.0f} s"
        )
        proof = replace(proof, said=(*proof.said, text))
    return replace(proof, is_exact=is_exact, reason=reason)


def _with_samples(proof: SourceProof, read: Mapping[int, tuple[int, int, int]], *, wanted: int) -> SourceProof:
    """Add to the proof the samples that read the same twice under one seed.

    read: the checksums of each sample: two reads under one seed, and one under another.
    """
    alike = {number: first for number, (first, again, _) in read.items() if first == again}
    said = []
    if len(read) < wanted:
        said.append(f"the proof was cut short: {len(read)} of {wanted} samples were read in {READ_FOR_S:.0f} s")
    if len(alike) < len(read):
        unlike = shown_numbers([number for number in read if number not in alike])
        said.append(f"{unlike} differs from itself when it is read twice with one seed, and is not compared")
    return replace(
        proof,
        samples=alike,
        lasting=frozenset(number for number in alike if read[number][2] == alike[number]),
        said=tuple(said),
    )


def _spread(length: int) -> list[int]:
    """Return the numbers of the samples to compare: the outermost first, in case time runs out."""
    last = length - 1
    even = [last * part // (MAX_SAMPLES - 1) for part in range(MAX_SAMPLES)]
    return [*dict.fromkeys([0, last, 1 % length, *even[::2], *even])][:MAX_SAMPLES]


def _read_numbered(dataset: Any, numbers: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """Act as the child: read samples by number."""
    generators = [generator for _, generator in generators_in(dataset, "dataset")]
    began = time.monotonic()
    found: dict[int, tuple[int, int, int]] = {}
    for number in numbers:
        if found and time.monotonic() - began > READ_FOR_S:
            break
        crcs = []
        for salt in (0, 0, 1):
            seed_worker(2 * number + salt)
            for generator in generators:
                seed_generator(generator, 2 * number + salt)
            crcs.append(checksum(dataset[number]))
        found[number] = (crcs[0], crcs[1], crcs[2])
    return found


@dataclass(frozen=True, slots=True)
class _TrialRead:
    """The samples and states that a child has read from a stream.

    rows: the checksums of its samples. states: the state after a number of samples read in this child, by that number.
    """

    rows: list[int]
    states: dict[int, StreamState]


class _SeededStream(OneStream):
    """A stream that is read as in training, but with random generators that are seeded before each sample."""

    salt = 0

    def _next(self, rows: Any) -> Any:
        seed_worker(2 * self._at.rows + self.salt)  # not the stream's own generators: its order may depend on them
        return next(rows)


def _trial_read(
    dataset: Any,
    plan: StreamPlan,
    rows: int,
    *,
    salt: int = 0,
    at: StreamState | None = None,
    states_after: Sequence[int] = (),
    for_s: float | None = None,
) -> _TrialRead:
    """Read a stream in a child.

    at: the state that it is moved to first. for_s: how long to read, by default READ_FOR_S.
    """
    limit = READ_FOR_S if for_s is None else for_s
    call = partial(_read_stream, dataset, plan, rows, salt=salt, at=at, states_after=states_after, for_s=limit)
    return isolated(call, within_s=CALL_WITHIN_S)


def _read_stream(
    dataset: Any,
    plan: StreamPlan,
    rows: int,
    *,
    salt: int,
    at: StreamState | None,
    states_after: Sequence[int],
    for_s: float,
) -> _TrialRead:
    """Act as the child: read a stream."""
    number = plan.mine()[0]
    is_exact = at is not None or bool(states_after)
    stream = _SeededStream(dataset, plan, number, at or StreamState(number=number), is_exact=is_exact)
    stream.salt = salt
    read, began = _TrialRead([], {}), time.monotonic()
    while len(read.rows) < rows and (not read.rows or time.monotonic() - began < for_s):
        try:
            read.rows.append(checksum(stream.read()))
        except (StopIteration, ConfigError):  # the end of a stream, or an empty one, which training will report
            break
        if len(read.rows) in states_after:
            read.states[len(read.rows)] = stream.state()
    return read


def _tried_state(dataset: Any, plan: StreamPlan) -> tuple[bool | None, str, int]:
    """Return whether a stream resumes where its state was taken, why not, and how many restarts tested that."""
    began, restarts, has_compared = time.monotonic(), 0, False
    try:
        whole = _trial_read(dataset, plan, MAX_ROWS, states_after=STRIDES, for_s=ROWS_FOR_S)
        states = dict(whole.states)  # the newest, by stride
        for number in range(1, RESTARTS + 1):
            for stride, state in list(states.items()):
                at = number * stride
                if at >= len(whole.rows):
                    continue
                if time.monotonic() - began > TRY_FOR_S:
                    return (True, "", restarts) if has_compared else (None, "there was no time to try its state", 0)
                read = _trial_read(
                    dataset, plan, len(whole.rows) - at, at=state, states_after=(stride,), for_s=CALL_WITHIN_S
                )
                if read.rows != whole.rows[at:]:
                    why = f"its state, taken after {at} samples and restored, does not lead to the next one"
                    return False, why, restarts
                states[stride] = read.states.get(stride, state)
                has_compared = True
            restarts = number
    except TrialError as error:
        return False if error.has_failed else None, f"its state could not be tried: {error}", restarts
    if not has_compared:
        return None, f"too few samples came within {ROWS_FOR_S} s to try its state", 0
    return True, "", restarts
