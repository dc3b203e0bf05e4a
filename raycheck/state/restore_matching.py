"""Compares a checkpoint with the live state before a restore changes anything, and finds the tensors to read into.

One error lists every difference between the two. Memory is allocated and tensors are read only after the comparison has
passed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from raycheck.bucket.assembly.role import RandomSource, Role, is_under
from raycheck.bucket.format.index import Index, places
from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError, CorruptError, RaycheckError, StateMismatchError, SupersededError
from raycheck.state.entries.meta_tensors import is_on_meta
from raycheck.state.entries.module.module_entry import ModuleEntry
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.saved_entry import Named, SavedEntry
from raycheck.state.entries.state_entry import ASSETS, OWN_ENTRIES, StateEntry
from raycheck.state.restore_result import RestoreReport
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.transfer.stage.local_box import LocalBox, boxes_of, merge_tied


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMatch:
    """A checkpoint and the live state that it fits.

    saved: each entry in the checkpoint. wanted: the live tensors of each entry to read into. boxes: the same tensors as
    boxes to read, each memory once.
    """

    saved: Mapping[StateEntry, SavedEntry]
    wanted: Mapping[StateEntry, Named]
    boxes: Sequence[LocalBox]
    report: RestoreReport
    progress: Progress

    @property
    def touched(self) -> set[str]:
        """Return the names of the entries and tensors that the restore will have changed."""
        return {*self.report.restored, *(name for box in self.boxes for name in (box.name, *dict(box.aliases)))}


class CheckpointMatcher:
    """The comparison of checkpoints with the entries of one rank. It ignores the entries of other roles."""

    def __init__(self, entries: Sequence[StateEntry], role: Role) -> None:
        self._entries = entries
        self._role = role

    def match(
        self, key: str, index: Index, selection: Selection, *, strict: bool, cast: bool, touched_before: set[str]
    ) -> CheckpointMatch:
        """Compare the checkpoint with the live state, and give memory to tensors on the meta device.

        touched_before: names that an earlier restore of this process changed. Raises StateMismatchError, which lists
        every difference, or SupersededError if the checkpoint does not cover some of those names; in both cases nothing
        was changed.
        """
        saved = {*index.values, *(name for values in index.rank_values for name in values)} - {ASSETS}
        there = {name for name in saved if not is_under(name, self._role.others)}
        if selection != EVERYTHING:
            self.check_selection(selection, [*saved, *(tensor.name for tensor in index.tensors)])
        with corrupt_if_odd(key):
            match = self._match_entries(index, selection, there, strict=strict, cast=cast)
        _refuse_leftovers(key, touched_before - match.touched)
        mismatched = [line for found in match.saved.values() for line in found.mismatched]
        mismatched += [line for entry in self._entries for line in entry.left_on_meta(match.wanted.get(entry, {}))]
        _refuse_differences(key, match.report, mismatched, self._advice(match), strict=strict)
        if any(is_on_meta(tensor) for tensors in match.wanted.values() for tensor in tensors.values()):
            for entry in match.wanted:
                if isinstance(entry, ModuleEntry):
                    entry.give_memory()
            with corrupt_if_odd(key):  # again: only now do the tensors to read into have memory
                match = self._match_entries(index, selection, there, strict=strict, cast=cast)
        return match

    def random_source(self, key: str, index: Index) -> RandomSource:
        """Return whose random state this rank takes."""
        source = self._role.random_source(index.rank_values)
        with corrupt_if_odd(key):
            for entry in self._entries:
                if (chosen := _random_rank(entry, source.saved)) is not None:
                    return source._replace(rank=chosen)
        return source

    def _advice(self, match: CheckpointMatch) -> list[str]:
        """Return what to do about the differences."""
        lines = list(dict.fromkeys(line for found in match.saved.values() for line in found.advice))
        optimizers = [entry for entry in match.saved if isinstance(entry, OptimizerEntry)]
        skip: list[str] = []
        for entry, found in match.saved.items():
            skip += found.reshaped if entry.can_split else [entry.name] * bool(found.reshaped)
            skip += [optimizer.name for optimizer in optimizers for name in found.reshaped if optimizer.steps(name)]
        if skip:
            lines.append(
                "where a shape differs, give the live tensor the saved shape before restore() (peek().shapes has it), "
                f"or start with the values here: restore(skip={list(dict.fromkeys(skip))})"
            )
        if any(found.castable for found in match.saved.values()):
            lines.append("where only the floating-point type of a weight differs, restore(cast=True) converts it")
        return lines

    def check_selection(self, selection: Selection, saved: Iterable[str] = ()) -> None:
        """Raise ConfigError for a name that is neither in the live state nor among the saved names."""
        inner_names = [name for entry in self._entries if entry.can_split for name in entry.names()]
        elsewhere = [name for name in (*(selection.only or ()), *selection.skip) if is_under(name, self._role.others)]
        selection.check([*(entry.name for entry in self._entries), *inner_names, *saved, *elsewhere])

    def _match_entries(
        self, index: Index, selection: Selection, there: set[str], *, strict: bool, cast: bool
    ) -> CheckpointMatch:
        saved = self._saved_entries(index, selection, strict=strict, cast=cast)
        wanted = {entry: entry.match(found) for entry, found in saved.items()}
        return CheckpointMatch(
            saved=saved,
            wanted=wanted,
            boxes=_boxes_to_read(wanted, saved),
            report=self._report(saved, wanted, selection, there),
            progress=Progress.of(index.values["progress"]) if selection.takes("progress") else Progress(),
        )

    def _saved_entries(
        self, index: Index, selection: Selection, *, strict: bool, cast: bool
    ) -> dict[StateEntry, SavedEntry]:
        """Return the saved side of each entry that is to be restored."""
        place_of = places(index)
        dtypes = {tensor.name: tensor.dtype for tensor in index.tensors} if cast else None
        saved = {}
        for entry in self._entries:
            if not selection.touches(entry.name):
                continue
            if selection.splits(entry.name) and not entry.can_split:
                raise ConfigError(f"restore: select {entry.name!r} as a whole; only modules can be restored in part")
            saved_by, (own, world_size) = self._role.saved_by(entry.name, index.rank_values)
            by_rank = {
                rank: values[entry.name]
                for rank, values in enumerate(saved_by)
                if entry.name in values and isinstance(values[entry.name], list) == entry.is_per_rank
            }
            if entry.is_per_rank:
                values = by_rank.get(own)
            else:
                values = index.values.get(entry.name, next(iter(by_rank.values()), None))
            saved[entry] = SavedEntry(
                {tensor.name: tensor for tensor in index.tensors if f"{tensor.name}.".startswith(f"{entry.name}.")},
                values,
                rank_values=tuple(by_rank.values()),
                place=place_of.get,
                takes=selection.takes,
                dtypes=dtypes,
                strict=strict,
            )
            if entry.is_per_rank:
                saved[entry].unused += [f"{entry.name}.rank{rank}" for rank in by_rank if rank >= world_size]
        return saved

    def _report(
        self,
        saved: Mapping[StateEntry, SavedEntry],
        wanted: Mapping[StateEntry, Named],
        selection: Selection,
        there: set[str],
    ) -> RestoreReport:
        restored, skipped = [], []
        for entry in self._entries:
            found = saved.get(entry)
            if found is None:
                skipped.append(entry.name)
            elif found.values is None and not wanted[entry]:
                continue  # the entry has recorded itself as missing or fresh
            elif selection.splits(entry.name):
                names, not_there = entry.names(), set(found.missing)
                restored += [name for name in names if selection.takes(name) and name not in not_there]
                skipped += [name for name in names if not selection.takes(name)]
            else:
                restored.append(entry.name)
        for name in OWN_ENTRIES:
            (restored if selection.takes(name) else skipped).append(name)
        only_there = sorted(there - {*(entry.name for entry in self._entries), *OWN_ENTRIES})
        skipped += [name for name in only_there if not selection.touches(name)]
        unexpected = [name for name in only_there if selection.touches(name)]
        return RestoreReport(
            restored=tuple(restored),
            skipped=tuple(skipped),
            missing=tuple(line for found in saved.values() for line in found.missing),
            unexpected=(*(line for found in saved.values() for line in found.unexpected), *unexpected),
            fresh=tuple(line for found in saved.values() for line in found.fresh),
            unused=tuple(line for found in saved.values() for line in found.unused),
            cast=tuple(line for found in saved.values() for line in found.cast),
            registered=tuple(line for found in saved.values() for line in found.registered),
        )


def _random_rank(entry: StateEntry, saved: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number, in what each rank saved for itself, that the entry chooses among the ranks that had it."""
    theirs = [number for number, values in enumerate(saved) if entry.name in values]
    chosen = entry.random_rank([saved[number][entry.name] for number in theirs])
    if chosen is None or chosen < len(theirs):
        return None if chosen is None else theirs[chosen]
    return len(saved) + chosen - len(theirs)  # no rank had it


@contextmanager
def corrupt_if_odd(key: str) -> Iterator[None]:
    """Raise CorruptError if values from an index do not fit the code that loads them.

    An index that passed its checksum may still have been written by an attacker.
    """
    try:
        yield
    except RaycheckError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CorruptError(
            f"checkpoint {key} holds values that do not fit the state: {type(error).__name__}: {error}"
        ) from error


def _refuse_leftovers(key: str, left: set[str]) -> None:
    """Raise SupersededError for what a damaged checkpoint has changed and this one would leave unchanged.

    Otherwise training would use it.
    """
    if left:
        raise SupersededError(
            f"{min(left)} holds what a damaged checkpoint had for it, and {key} has nothing for it: start the workers "
            "again"
        )


def _refuse_differences(
    key: str, report: RestoreReport, mismatched: Sequence[str], advice: Sequence[str], *, strict: bool
) -> None:
    """Raise StateMismatchError that lists all differences.

    `mismatched`, what both sides have but with differences, is always refused; what only one side has is refused if
    `strict`.
    """
    if not mismatched and not (strict and (report.missing or report.unexpected)):
        return
    lines = [
        f"checkpoint {key} and the live state do not hold the same things; nothing was changed.",
        *(f"  not alike: {line}" for line in mismatched),
        *(f"  missing in the checkpoint: {line}" for line in report.missing),
        *(f"  only in the checkpoint: {line}" for line in report.unexpected),
    ]
    lines += [f"  {line}" for line in advice]
    if not mismatched:
        lines.append(
            "  restore(skip=[...]) leaves out entries by name; restore(strict=False) restores what both sides have"
        )
    raise StateMismatchError("\n".join(lines))


def _boxes_to_read(wanted: Mapping[StateEntry, Named], saved: Mapping[StateEntry, SavedEntry]) -> list[LocalBox]:
    """Return the boxes to read, each memory once, except boxes of which this rank has no elements.

    Record a mismatch for tensors that are tied here and were not tied when saved.
    """
    entry_of = {name: entry for entry, tensors in wanted.items() for name in tensors}
    boxes = merge_tied(
        box
        for tensors in wanted.values()
        for name, tensor in tensors.items()
        for box in boxes_of(name, (name,), tensor, may_spread=False)
    )
    for box in boxes:
        found = saved[entry_of[box.name]]
        found.mismatched += [
            f"{box.name} and {name} are tied here, but were not when saved"
            for name, _ in box.aliases
            if found.place(name) != found.place(box.name)
        ]
    return [_with_cast(box, saved[entry_of[box.name]]) for box in boxes if box.local.numel()]


def _with_cast(box: LocalBox, found: SavedEntry) -> LocalBox:
    dtype: torch.dtype = getattr(torch, found.tensors[box.name].dtype)
    return box if dtype == box.local.dtype else replace(box, cast_from=dtype)
