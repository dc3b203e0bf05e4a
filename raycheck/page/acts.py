"""The actions of a page with --edit. Each one first shows what it will do and the equivalent command line.

Every function here blocks while it reads from and writes to the bucket; server.py calls them in threads.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raycheck import Run, export_hf
from raycheck.catalog import delete_checkpoint
from raycheck.errors import ConfigError
from raycheck.page.pages import PageScope
from raycheck.views.in_words import size

Told = Callable[[str], None]
"""Receives the progress of a long action, as text."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The object of an action: the checkpoint `at` (a key, "" for the run itself) of the run `name`.

    value: the user's input, for an action that asks for it.
    """

    place: PageScope
    name: str
    at: str
    value: str = ""

    def run(self) -> Run:
        """Open the run. Raises NotFoundError."""
        return self.place.run(self.name)

    @property
    def uri(self) -> str:
        """Return the run's URI without settings, which may be private."""
        return self.place.uri(self.name).partition("?")[0]


@dataclass(frozen=True, kw_only=True)
class Act:
    """An action on a run.

    label: the word on the button; in lower case, the action's name. line: the equivalent command line, in which {uri},
    {at} and {value} are the target's. preview: returns sentences that describe what `do` would change; it writes
    nothing, and raises what `do` would raise before its first write. do: performs the action and returns the result in
    a sentence. asks_for: the label of the input that the user must give, "" for none. is_long: it may take too long for
    a request, so it runs in the background. deletes: what it takes away cannot be brought back.
    """

    label: str
    line: str
    preview: Callable[[Target], str]
    do: Callable[[Target, Told], str]
    asks_for: str = ""
    is_long: bool = False
    deletes: bool = False

    def command(self, target: Target) -> str:
        """Return the command line as a shell takes it."""
        given = {"uri": target.uri, "at": target.at, "value": target.value or "NAME"}
        return shlex.join(["raycheck", *(word.format(**given) for word in self.line.split())])


def _before_pin(target: Target) -> str:
    return f"{target.run().at(target.at).key} is kept until it is unpinned, whatever the retention rules say."


def _pin(target: Target, _: Told) -> str:
    target.run().pin(target.at)
    return f"{target.at} is pinned."


def _before_unpin(target: Target) -> str:
    return f"{target.run().at(target.at).key} follows the retention rules again; the next commit may drop it."


def _unpin(target: Target, _: Told) -> str:
    target.run().unpin(target.at)
    return f"{target.at} follows the retention rules."


def _before_name(target: Target) -> str:
    key = target.run().at(target.at).key
    return f"{key} gets a name by which it can be restored. It is kept until the name is removed."


def _name(target: Target, _: Told) -> str:
    target.run().name_checkpoint(target.at, target.value)
    return f"{target.at} is named {target.value}."


def _before_rewind(target: Target) -> str:
    run = target.run()
    checkpoint, state, head = run.at(target.at), run.status().state, run.head
    later = sum(item.step > checkpoint.step for item in run.checkpoints)
    stops = "" if state == "finished" else f" The run is {state}: training that is still running will be stopped."
    return (
        f"The next start restores {checkpoint.key}, not {head.key if head else None}. {later} checkpoints of later "
        f"steps remain listed until retention drops them.{stops}"
    )


def _rewind(target: Target, _: Told) -> str:
    return f"The head is {target.run().rewind(target.at).at(None).key}."


def _before_delete(target: Target) -> str:
    checkpoint = target.run().at(target.at)
    delete_checkpoint(target.place.uri(target.name), target.at, dry_run=True, storage=target.place.storage)
    return (
        f"{checkpoint.key} ({size(checkpoint.size_bytes)}) disappears from lists and can no longer be restored, "
        "effective at once. The first commit or prune after ten minutes deletes its objects, except those that other "
        "checkpoints or runs use."
    )


def _delete(target: Target, _: Told) -> str:
    return f"{delete_checkpoint(target.place.uri(target.name), target.at, storage=target.place.storage)} is deleted."


def _before_verify(target: Target) -> str:
    checkpoint = target.run().at(target.at)
    return (
        f"All {size(checkpoint.size_bytes)} of {checkpoint.key} are read and compared with their checksums. "
        "Nothing is changed."
    )


def _verify(target: Target, told: Told) -> str:
    checkpoint = target.run().at(target.at)
    count = read = 0
    bad: list[str] = []
    for found in checkpoint.verify():
        count, read = count + 1, read + found.size_bytes
        if found.problem:
            bad.append(f"{found.key}: {found.problem}")
        told(f"{size(read)} of about {size(checkpoint.size_bytes)} read")
    if bad:
        return f"DAMAGED, {len(bad)} of {count} objects: {'; '.join(bad[:5])}"
    return f"All {count} objects of {checkpoint.key} are intact ({size(read)})."


def _before_export(target: Target) -> str:
    checkpoint = target.run().at(target.at)
    return (
        f"The model of {checkpoint.key} is written as a Hugging Face directory under exports/ of this run. At most "
        f"{size(checkpoint.size_bytes)} are read and written."
    )


def _export(target: Target, told: Told) -> str:
    told("writing")
    base, mark, query = target.place.uri(target.name).partition("?")
    checkpoint = target.run().at(target.at)
    done = export_hf(checkpoint, f"{base}/exports/{target.at}{mark}{query}", storage=target.place.storage)
    return f"{len(done.files)} files were written to exports/{target.at}."


def _before_prune(target: Target) -> str:
    found = target.run().prune(dry_run=True)
    if not found:
        return "Nothing is dropped or expired: nothing would be deleted."
    now = [item for item in found if not item.wait_s]
    return (
        f"{len(found)} checkpoints are dropped or have expired, {size(sum(item.size_bytes for item in found))}. "
        f"{len(now)} of them would be deleted now, the others once their readers have had ten minutes."
    )


def _prune(target: Target, told: Told) -> str:
    told("deleting")
    return f"{sum(item.is_deleted for item in target.run().prune())} checkpoints were deleted."


def _before_sweep(target: Target) -> str:
    found = target.run().sweep(dry_run=True)
    if not found:
        return "Interrupted saves of earlier attempts have left nothing behind: nothing would be deleted."
    return (
        f"{len(found)} interrupted saves and uploads of earlier attempts would be deleted, "
        f"{size(sum(item.size_bytes for item in found))}. No checkpoint is among them."
    )


def _sweep(target: Target, told: Told) -> str:
    told("deleting")
    found = target.run().sweep()
    return f"{len(found)} interrupted saves and uploads were deleted, {size(sum(item.size_bytes for item in found))}."


ACTS: Mapping[str, Act] = {act.label.lower(): act for act in (
    Act(label="Pin", line="pin {uri} {at}", preview=_before_pin, do=_pin),
    Act(label="Unpin", line="unpin {uri} {at}", preview=_before_unpin, do=_unpin),
    Act(label="Name", line="name {uri} {at} {value}", preview=_before_name, do=_name, asks_for="The name"),
    # A checkpoint marked as damaged is read completely first.
    Act(label="Rewind", line="rewind {uri} {at}", preview=_before_rewind, do=_rewind, is_long=True),
    Act(label="Delete", line="delete {uri} {at}", preview=_before_delete, do=_delete, deletes=True),
    Act(label="Verify", line="verify {uri} --at {at}", preview=_before_verify, do=_verify, is_long=True),
    Act(
        label="Export", line="export-hf {uri} {uri}/exports/{at} --at {at}",
        preview=_before_export, do=_export, is_long=True,
    ),
    Act(label="Prune", line="prune {uri}", preview=_before_prune, do=_prune, is_long=True, deletes=True),
    Act(label="Sweep", line="sweep {uri}", preview=_before_sweep, do=_sweep, is_long=True, deletes=True),
)}  # fmt: skip


def act_of(kind: str) -> Act:
    """Return the action with this name. Raises ConfigError."""
    if kind not in ACTS:
        raise ConfigError(f"{kind!r} is not an action of this page")
    return ACTS[kind]


def act_view(place: PageScope, name: str, kind: str, at: str) -> dict[str, Any]:
    """Return the values of an action's confirmation page."""
    act = act_of(kind)
    key = place.run(name).at(at).key if at else ""
    target = Target(place=place, name=name, at=key)
    return {
        "name": name,
        "kind": kind,
        "at": key,
        "act": act,
        "preview": act.preview(target),
        "command": act.command(target),
    }
