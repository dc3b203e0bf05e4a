"""Does what a page with --edit offers: each act says beforehand what it will do, and which command line it equals.

Every function here blocks while it reads from the bucket and writes to it; server.py calls them in threads.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raycheck import ConfigError, Run, delete_checkpoint, export_hf
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


class Act(ABC):
    """Is one thing that a page can do to a run.

    label: the word on the button. asks_for: the label of the text that the user has to give, "" for none. is_long: it
    may take longer than a request should, so it goes on in the background.
    """

    label: ClassVar[str]
    asks_for: ClassVar[str] = ""
    is_long: ClassVar[bool] = False

    @abstractmethod
    def preview(self, target: Target) -> str:
        """Says what `do` would change, in sentences. Writes nothing. Raises what `do` raises before its first write."""

    @abstractmethod
    def words(self, target: Target) -> list[str]:
        """Returns the command line that does the same."""

    @abstractmethod
    def do(self, target: Target, told: Told) -> str:
        """Does it. Returns what came of it, in a sentence."""

    def command(self, target: Target) -> str:
        """Returns the command line as a shell takes it."""
        return shlex.join(["raycheck", *self.words(target)])


class Pin(Act):
    label = "Pin"

    def preview(self, target: Target) -> str:
        return f"{target.run().at(target.at).entry.key} stays until it is unpinned, whatever the rules say."

    def words(self, target: Target) -> list[str]:
        return ["pin", target.uri, target.at]

    def do(self, target: Target, told: Told) -> str:
        del told
        target.run().pin(target.at)
        return f"{target.at} is pinned."


class Unpin(Act):
    label = "Unpin"

    def preview(self, target: Target) -> str:
        return f"{target.run().at(target.at).entry.key} is left to the rules again; the next commit may drop it."

    def words(self, target: Target) -> list[str]:
        return ["unpin", target.uri, target.at]

    def do(self, target: Target, told: Told) -> str:
        del told
        target.run().unpin(target.at)
        return f"{target.at} is left to the rules."


class Name(Act):
    label = "Name"
    asks_for = "The name"

    def preview(self, target: Target) -> str:
        key = target.run().at(target.at).entry.key
        return f"{key} gets a name, by which it can be restored. It stays until the name is taken off."

    def words(self, target: Target) -> list[str]:
        return ["name", target.uri, target.at, target.value or "NAME"]

    def do(self, target: Target, told: Told) -> str:
        del told
        target.run().name_checkpoint(target.at, target.value)
        return f"{target.at} is named {target.value}."


class Rewind(Act):
    label = "Rewind"
    is_long = True  # one that was found damaged is read through first

    def preview(self, target: Target) -> str:
        run = target.run()
        checkpoint, state = run.at(target.at), run.history().status.state
        later = sum(item.step > checkpoint.step for item in run.checkpoints)
        stops = "" if state == "finished" else f" The run is {state}: a training of it that still goes on is ended."
        return (
            f"The next start restores {checkpoint.entry.key}, not {run.latest.head}. {later} checkpoints of later "
            f"steps stay listed until retention drops them.{stops}"
        )

    def words(self, target: Target) -> list[str]:
        return ["rewind", target.uri, target.at]

    def do(self, target: Target, told: Told) -> str:
        del told
        return f"The head is {target.run().rewind(target.at).latest.head}."


class Delete(Act):
    label = "Delete"

    def preview(self, target: Target) -> str:
        run = target.run()
        entry = run.at(target.at).entry
        if entry.key == run.latest.head:
            raise ConfigError(f"{entry.key} is the head, which the next start restores; rewind to another one first")
        return (
            f"{entry.key} ({size(entry.size_bytes)}) is no longer listed or restored at once. The first commit or "
            "prune after ten minutes deletes its objects. What other checkpoints or runs use of it stays."
        )

    def words(self, target: Target) -> list[str]:
        return ["delete", target.uri, target.at]

    def do(self, target: Target, told: Told) -> str:
        del told
        return (
            f"{delete_checkpoint(target.place.uri(target.name), target.at, storage=target.place.storage)} is deleted."
        )


class Verify(Act):
    label = "Verify"
    is_long = True

    def preview(self, target: Target) -> str:
        entry = target.run().at(target.at).entry
        return (
            f"All {size(entry.size_bytes)} of {entry.key} are read, and compared with their checksums. Nothing changes."
        )

    def words(self, target: Target) -> list[str]:
        return ["verify", target.uri, "--step", target.at]

    def do(self, target: Target, told: Told) -> str:
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


class Export(Act):
    label = "Export"
    is_long = True

    def preview(self, target: Target) -> str:
        entry = target.run().at(target.at).entry
        return (
            f"The model of {entry.key} is written as a Hugging Face directory below exports/ of this run. At most "
            f"{size(entry.size_bytes)} are read and written."
        )

    def words(self, target: Target) -> list[str]:
        return ["export-hf", target.uri, f"{target.uri}/exports/{target.at}", "--step", target.at]

    def do(self, target: Target, told: Told) -> str:
        told("writing")
        base, mark, query = target.place.uri(target.name).partition("?")
        checkpoint = target.run().at(target.at)
        done = export_hf(checkpoint, f"{base}/exports/{target.at}{mark}{query}", storage=target.place.storage)
        return f"{len(done.files)} files lie in exports/{target.at}."


class Prune(Act):
    label = "Prune"
    is_long = True

    def preview(self, target: Target) -> str:
        found = target.run().plan_prune()
        if not found:
            return "Nothing is dropped or expired: nothing would be deleted."
        now = [item for item in found if not item.wait_s]
        return (
            f"{len(found)} checkpoints are dropped or have expired, {size(sum(item.size_bytes for item in found))}. "
            f"{len(now)} of them would be deleted now, the others when their readers' time is over."
        )

    def words(self, target: Target) -> list[str]:
        return ["prune", target.uri]

    def do(self, target: Target, told: Told) -> str:
        told("deleting")
        return f"{len(target.run().prune())} checkpoints were deleted."


class Sweep(Act):
    label = "Sweep"
    is_long = True

    def preview(self, target: Target) -> str:
        found = target.run().plan_sweep()
        if not found:
            return "No interrupted save of an earlier attempt has left anything: nothing would be deleted."
        return (
            f"{len(found)} interrupted saves and uploads of earlier attempts would be deleted, "
            f"{size(sum(item.size_bytes for item in found))}. No checkpoint is among them."
        )

    def words(self, target: Target) -> list[str]:
        return ["sweep", target.uri]

    def do(self, target: Target, told: Told) -> str:
        told("deleting")
        found = target.run().sweep()
        return (
            f"{len(found)} interrupted saves and uploads were deleted, {size(sum(item.size_bytes for item in found))}."
        )


ACTS: Mapping[str, Act] = {type(act).__name__.lower(): act for act in (
    Pin(), Unpin(), Name(), Rewind(), Delete(), Verify(), Export(), Prune(), Sweep()
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
