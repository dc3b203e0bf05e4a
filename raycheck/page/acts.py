"""Does what a page with --edit offers: each act says beforehand what it will do, and which command line it equals.

Every function here blocks while it reads from the bucket and writes to it; server.py calls them in threads.
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
"""Takes how far a long act is, in words."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Says what an act is about: the checkpoint `at` (a key, "" for the run itself) of the run `name`.

    value: what the user has typed, for an act that asks for it.
    """

    place: PageScope
    name: str
    at: str
    value: str = ""

    def run(self) -> Run:
        """Opens the run. Raises NotFoundError."""
        return self.place.run(self.name)

    @property
    def uri(self) -> str:
        """Returns the run's address, without settings: they may be nobody else's business."""
        return self.place.uri(self.name).partition("?")[0]


@dataclass(frozen=True, kw_only=True)
class Act:
    """One thing that a page can do to a run.

    label: the word on the button; in small letters, what the act is called. line: the command line that does the same,
    in which {uri}, {at} and {value} are the target's. preview: says in sentences what `do` would change; it writes
    nothing, and raises what `do` raises before its first write. do: does it, and returns what came of it, in a
    sentence. asks_for: the label of the text that the user has to give, "" for none. is_long: it may take longer than a
    request should, so it goes on in the background.
    """

    label: str
    line: str
    preview: Callable[[Target], str]
    do: Callable[[Target, Told], str]
    asks_for: str = ""
    is_long: bool = False

    def command(self, target: Target) -> str:
        """Return the command line as a shell takes it."""
        given = {"uri": target.uri, "at": target.at, "value": target.value or "NAME"}
        return shlex.join(["raycheck", *(word.format(**given) for word in self.line.split())])


def _before_pin(target: Target) -> str:
    return f"{target.run().at(target.at).entry.key} stays until it is unpinned, whatever the rules say."


def _pin(target: Target, _: Told) -> str:
    target.run().pin(target.at)
    return f"{target.at} is pinned."


def _before_unpin(target: Target) -> str:
    return f"{target.run().at(target.at).entry.key} is left to the rules again; the next commit may drop it."


def _unpin(target: Target, _: Told) -> str:
    target.run().unpin(target.at)
    return f"{target.at} is left to the rules."


def _before_name(target: Target) -> str:
    key = target.run().at(target.at).entry.key
    return f"{key} gets a name, by which it can be restored. It stays until the name is taken off."


def _name(target: Target, _: Told) -> str:
    target.run().name_checkpoint(target.at, target.value)
    return f"{target.at} is named {target.value}."


def _before_rewind(target: Target) -> str:
    run = target.run()
    checkpoint, state = run.at(target.at), run.history().status.state
    later = sum(item.step > checkpoint.step for item in run.checkpoints)
    stops = "" if state == "finished" else f" The run is {state}: a training of it that still goes on is ended."
    return (
        f"The next start restores {checkpoint.entry.key}, not {run.latest.head}. {later} checkpoints of later "
        f"steps stay listed until retention drops them.{stops}"
    )


def _rewind(target: Target, _: Told) -> str:
    return f"The head is {target.run().rewind(target.at).latest.head}."


def _before_delete(target: Target) -> str:
    run = target.run()
    entry = run.at(target.at).entry
    if entry.key == run.latest.head:
        raise ConfigError(f"{entry.key} is the head, which the next start restores; rewind to another one first")
    return (
        f"{entry.key} ({size(entry.size_bytes)}) is no longer listed or restored at once. The first commit or "
        "prune after ten minutes deletes its objects. What other checkpoints or runs use of it stays."
    )


def _delete(target: Target, _: Told) -> str:
    return f"{delete_checkpoint(target.place.uri(target.name), target.at, storage=target.place.storage)} is deleted."


def _before_verify(target: Target) -> str:
    entry = target.run().at(target.at).entry
    return f"All {size(entry.size_bytes)} of {entry.key} are read, and compared with their checksums. Nothing changes."


def _verify(target: Target, told: Told) -> str:
    checkpoint = target.run().at(target.at)
    count = read = 0
    bad: list[str] = []
    for found in checkpoint.verify():
        count, read = count + 1, read + found.size_bytes
        if found.problem:
            bad.append(f"{found.key}: {found.problem}")
        told(f"{size(read)} of about {size(checkpoint.entry.size_bytes)} read")
    if bad:
        return f"DAMAGED, {len(bad)} of {count} objects: {'; '.join(bad[:5])}"
    return f"All {count} objects of {checkpoint.entry.key} are right ({size(read)})."


def _before_export(target: Target) -> str:
    entry = target.run().at(target.at).entry
    return (
        f"The model of {entry.key} is written as a Hugging Face directory below exports/ of this run. At most "
        f"{size(entry.size_bytes)} are read and written."
    )


def _export(target: Target, told: Told) -> str:
    told("writing")
    base, mark, query = target.place.uri(target.name).partition("?")
    checkpoint = target.run().at(target.at)
    done = export_hf(checkpoint, f"{base}/exports/{target.at}{mark}{query}", storage=target.place.storage)
    return f"{len(done.files)} files lie in exports/{target.at}."


def _before_prune(target: Target) -> str:
    found = target.run().plan_prune()
    if not found:
        return "Nothing is dropped or expired: nothing would be deleted."
    now = [item for item in found if not item.wait_s]
    return (
        f"{len(found)} checkpoints are dropped or have expired, {size(sum(item.size_bytes for item in found))}. "
        f"{len(now)} of them would be deleted now, the others when their readers' time is over."
    )


def _prune(target: Target, told: Told) -> str:
    told("deleting")
    return f"{len(target.run().prune())} checkpoints were deleted."


def _before_sweep(target: Target) -> str:
    found = target.run().plan_sweep()
    if not found:
        return "No interrupted save of an earlier attempt has left anything: nothing would be deleted."
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
    # One that was found damaged is read through first.
    Act(label="Rewind", line="rewind {uri} {at}", preview=_before_rewind, do=_rewind, is_long=True),
    Act(label="Delete", line="delete {uri} {at}", preview=_before_delete, do=_delete),
    Act(label="Verify", line="verify {uri} --at {at}", preview=_before_verify, do=_verify, is_long=True),
    Act(
        label="Export", line="export-hf {uri} {uri}/exports/{at} --at {at}",
        preview=_before_export, do=_export, is_long=True,
    ),
    Act(label="Prune", line="prune {uri}", preview=_before_prune, do=_prune, is_long=True),
    Act(label="Sweep", line="sweep {uri}", preview=_before_sweep, do=_sweep, is_long=True),
)}  # fmt: skip


def act_of(kind: str) -> Act:
    """Returns the act that is called so. Raises ConfigError."""
    if kind not in ACTS:
        raise ConfigError(f"{kind!r} is nothing that the page can do")
    return ACTS[kind]


def act_view(place: PageScope, name: str, kind: str, at: str) -> dict[str, Any]:
    """Returns what the question before an act shows."""
    act = act_of(kind)
    key = place.run(name).at(at).entry.key if at else ""
    target = Target(place=place, name=name, at=key)
    return {
        "name": name,
        "kind": kind,
        "at": key,
        "act": act,
        "preview": act.preview(target),
        "command": act.command(target),
    }
