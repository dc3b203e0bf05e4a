"""Lets a run in training use a component of another run, its base, instead of uploading it. Step 39.

The base holds the directory for the run before any byte is compared. The run then *reserves* it: one swap of its
`latest` lists the loan, and a hold whose holder is the run itself. So its next commit refers only to what the body that
it replaces holds, as every commit does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from posixpath import basename

from raycheck.bucket.format.index import Index
from raycheck.bucket.format.latest import Entry, Hold, Latest, Loan
from raycheck.bucket.format.manifest import Component, Manifest
from raycheck.bucket.protocol.claim import Identity, check_current, claimed_body
from raycheck.bucket.protocol.paging import check_room
from raycheck.bucket.protocol.sharing.holds import HOLD_GRACE_S, borrow, check_holds, confirm_loans, directory_from
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError

MAX_LOOKED_AT = 10
"""The number of a base's checkpoints, newest first, whose components are examined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedTensor:
    """A tensor that a run is about to save. names: all its names; tied weights have several."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


Wanted = Mapping[str, tuple[WantedTensor, ...]]
"""The tensors of each component that a run is about to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOffer:
    """The components of a base that a run may use, and that are held for it.

    way: the path to the base. entry: its checkpoint. components: the records of its components, with their directories
    as the run names them. loans: what the `latest` of the run must list to use them.
    """

    way: str
    entry: Entry
    components: tuple[Component, ...]
    loans: tuple[Loan, ...]


def way_to_base(store: Store, base: Store) -> str:
    """Return the path from the run at `store` to its base. Raises ConfigError when it cannot be a base."""
    if base.bucket_id == store.bucket_id and base.root_path == store.root_path:
        raise ConfigError(f"SaveSettings(base=...): {base} is the run itself; give another run")
    way = store.way_to(base)
    if way is None:
        raise ConfigError(
            f"SaveSettings(base=...): {base} and {store} are not two runs in one bucket, reached in the same way; "
            "import or fork the base into this bucket, or leave base out"
        )
    return way


def offer(store: Store, base: Store, wanted: Wanted, *, run_id: str) -> BaseOffer:
    """Find the newest checkpoint of `base` that has wanted components, by names, types and shapes, and hold it there.

    Raises NotFoundError, which says what is missing, when there is none; ConfigError when `base` cannot be one, or its
    `latest` has no room for a hold.
    """
    way = way_to_base(store, base)
    body = read_latest(base)
    problem = "it has no committed checkpoint"
    for checkpoint, manifest in _candidates(base, body, wanted):
        index = checkpoint.read_index(manifest, values=False)
        problems = {name: missing_in(index, name, tensors) for name, tensors in wanted.items()}
        found = [part for part in manifest.components if problems.get(part.name) == ""]
        if found:
            directories = {part.checkpoint for part in found}
            loans = borrow(store, way, directories, run_id=run_id, renews=True)
            here = (replace(part, checkpoint=directory_from(store, way, part.checkpoint)) for part in found)
            return BaseOffer(way=way, entry=checkpoint.entry, components=tuple(here), loans=loans)
        problem = next(iter(problems.values()), "nothing is wanted of it")
    raise NotFoundError(f"{base}: {problem}")


def _candidates(base: Store, body: Latest, wanted: Wanted) -> Iterator[tuple[Checkpoint, Manifest]]:
    """Yield the checkpoints that may have wanted components, the head first, and only one of those that share them."""
    newest_first = [entry for entry in body.live[::-1] if not entry.damaged]
    seen: list[tuple[Component, ...]] = []
    for entry in sorted(newest_first, key=lambda entry: entry.key != body.head)[:MAX_LOOKED_AT]:
        checkpoint = Checkpoint(base, entry)
        manifest = checkpoint.read_manifest()
        parts = tuple(part for part in manifest.components if part.name in wanted)
        if parts not in seen:
            seen.append(parts)
            yield checkpoint, manifest


def missing_in(index: Index, component: str, tensors: Sequence[WantedTensor]) -> str:
    """Return in words which of these tensors a checkpoint's component lacks; "" for none."""
    numbers = numbers_in(index, component)
    if not numbers:
        return f"its checkpoints have no component {component}"
    for tensor in tensors:
        number = next((numbers[name] for name in tensor.names if name in numbers), None)
        if number is None:
            return f"its component {component} has no tensor {tensor.names[0]}"
        saved = index.tensors[number]
        if (saved.dtype, saved.shape) != (tensor.dtype, tensor.shape):
            return (
                f"its {saved.name} is {saved.dtype}{list(saved.shape)}, and here it is "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
    return ""


def numbers_in(index: Index, component: str) -> dict[str, int]:
    """Return the numbers in the index of the tensors in a component, by name."""
    plan = index.plan
    is_there = [item.component == component for item in plan.objects]
    return {
        tensor.name: number
        for number, (tensor, (first, end)) in enumerate(zip(plan.tensors, plan.rows(), strict=True))
        if first < end and is_there[plan.object[first]]
    }


def own_way(store: Store) -> str:
    """Return the path from a run to itself, the holder of its reservations."""
    return f"../{basename(store.root_path)}"


def reserve(register: Register, me: Identity, components: Iterable[Component], loans: tuple[Loan, ...]) -> None:
    """Let the next commits of this attempt refer to borrowed components: list loans and a reservation, then confirm.

    May be repeated. Raises SupersededError or FencedError when the attempt is over, CorruptError when a hold is gone,
    and ConfigError when `latest` is too full.
    """
    directories = {part.checkpoint for part in components}
    way = own_way(register.store)

    def change(body: Latest, now: float) -> Latest | None:
        body = claimed_body(register, body)
        check_current(register, body, me)
        listed = {loan.source: loan for loan in body.loans}
        merged = {loan.source: _merged(listed.get(loan.source), loan) for loan in loans}
        held = next((hold for hold in body.holds if hold.holder == way), None)
        every = directories | set(held.directories if held else ())
        is_fresh = held is not None and directories <= set(held.directories) and now - held.at < HOLD_GRACE_S / 2
        if is_fresh and all(listed.get(source) == loan for source, loan in merged.items()):
            return None
        mine = Hold(holder=way, run_id=body.run_id, directories=tuple(sorted(every)), at=now)
        others = tuple(hold for hold in body.holds if hold.holder != way)
        new = replace(body, loans=tuple((listed | merged).values()), holds=(*others, mine))
        check_room(new)
        return new

    body = register.edit(change, what="reservation of a borrowed component")
    if body.attempts[0].number == body.attempt.number == 1 and body.attempt.last_save == 0:
        check_holds(register.store, loans)  # this swap lists the run's first loans: one swap less of a crowded `latest`
    else:
        confirm_loans(register.store, loans, run_id=body.run_id, renews=True)


def _merged(before: Loan | None, loan: Loan) -> Loan:
    more = before.directories if before else ()
    return replace(loan, directories=tuple(sorted({*loan.directories, *more})))


def without_reservation(store: Store, body: Latest, directories: Iterable[str] | None = None) -> Latest:
    """Return `body` without the run's reservation. directories: remove only these, to which an entry now refers."""
    way = own_way(store)
    left: list[Hold] = []
    for hold in body.holds:
        kept = () if directories is None else tuple(name for name in hold.directories if name not in set(directories))
        if hold.holder != way:
            left.append(hold)
        elif kept:
            left.append(replace(hold, directories=kept))
    return replace(body, holds=tuple(left))
