"""Takes one rule at a time out of the protocol, to prove that the histories notice.

A mutant is a change of the source text, so that it removes exactly the line that states the rule. When that line moves
or changes, installing the mutant fails, and so does its test.
"""

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """Describes one change of the protocol.

    lacks: what the mutant does wrong, as a sentence. where: module and qualified name of the function. old: a text that
    the function's source holds once. new: the text in its place.
    """

    lacks: str
    where: str
    old: str
    new: str

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function wherever a module of raycheck or of the tests holds it."""
        module_name, _, name = self.where.partition(":")
        module = importlib.import_module(f"raycheck.bucket.protocol.{module_name}")
        owner, _, name = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        function = getattr(holder, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.where} holds {self.old!r} {source.count(self.old)} times"
        names: dict[str, object] = {}
        exec(compile(source.replace(self.old, self.new), f"<{self.lacks}>", "exec"), vars(module), names)
        patch.setattr(holder, name, names[name])
        if not owner:
            for user in [it for key, it in sys.modules.items() if key.startswith(("raycheck.", "tests."))]:
                if vars(user).get(name) is function:
                    patch.setattr(user, name, names[name])


MUTANTS = (
    Mutant(
        lacks="a commit does not look at the attempt",
        where="commit:commit",
        old="if current.number != manifest.attempt or current.coordinator != me.coordinator:",
        new="if False:",
    ),
    Mutant(
        lacks="a commit does not look at the coordinator",
        where="commit:commit",
        old=" or current.coordinator != me.coordinator",
        new="",
    ),
    Mutant(
        lacks="a commit does not look at the last save",
        where="commit:commit",
        old="if manifest.save <= current.last_save:",
        new="if False:",
    ),
    Mutant(
        lacks="a commit refers to what nobody holds",
        where="commit:commit",
        old="if missing:",
        new="if False:",
    ),
    Mutant(
        lacks="a commit is not judged by its effect",
        where="commit:commit",
        old="if body.entry(manifest.key) is not None:",
        new="if False:",
    ),
    Mutant(
        lacks="a claim does not know its own group again",
        where="claim:claim",
        old="if current.group == group:",
        new="if False:",
    ),
    Mutant(
        lacks="a fenced owner may claim",
        where="claim:check_owner",
        old="if body.attempt.owner != me.owner and body.has_owner(me.owner):",
        new="if False:",
    ),
    Mutant(
        lacks="a group that was replaced may claim",
        where="claim:claim",
        old="if any(known.group == group for known in body.attempts):",
        new="if False:",
    ),
    Mutant(
        lacks="a claim does not look for checkpoints of a lost latest",
        where="claim:refuse_lost",
        old="return not names or",
        new="return True or",
    ),
    Mutant(
        lacks="a swap sends its old decision again",
        where="swap:Register._try",
        old="new = self._decide(decide, body, got.at if got else time.time())",
        new=(
            "new = vars(decide).get('sent') or self._decide(decide, body, got.at if got else time.time())\n"
            "    decide.sent = new"
        ),
    ),
    Mutant(
        lacks="a swap puts without a condition",
        where="swap:Register._write",
        old="self.store.put_if_match(object_keys.LATEST_KEY, data, got.version)",
        new="(self.store.put(object_keys.LATEST_KEY, data), self.store.get(object_keys.LATEST_KEY))[1]",
    ),
    Mutant(
        lacks="a failed save is cleaned up",
        where="commit:commit",
        old='body = register.swap(decide, what=f"commit of {manifest.key}", at=at)',
        new=(
            "from raycheck.errors import StoreError\n"
            "        found = register.read()\n"
            "        new = decide(found[0], found[1].at) if found else None\n"
            "        try:\n"
            "            if new is not None:\n"
            "                register._write(replace(new, counter=found[0].counter + 1), found[1])\n"
            "        except StoreError:\n"
            "            for key, _ in manifest.objects():\n"
            "                register.store.delete(key)\n"
            "            raise\n"
            "        return new and new.entry(manifest.key)"
        ),
    ),
    Mutant(
        lacks="retention drops the pinned",
        where="retention:_protected",
        old="if entry.pinned:",
        new="if False:",
    ),
    Mutant(
        lacks="retention drops the head",
        where="retention:_protected",
        old="if body.head is not None:",
        new="if False:",
    ),
    Mutant(
        lacks="a prune deletes what others refer to",
        where="removal.prune_and_sweep:prune",
        old="is_held=name in held",
        new="is_held=False",
    ),
    Mutant(
        lacks="a prune forgets what others refer to",
        where="removal.prune_and_sweep:prune",
        old="if name not in held:",
        new="if True:",
    ),
    Mutant(
        lacks="a sweep deletes of the attempt it reads",
        where="removal.prune_and_sweep:_garbage",
        old="if name.attempt < number and str(name) not in named:",
        new="if name.attempt <= number and str(name) not in named:",
    ),
    Mutant(
        lacks="a sweep deletes what latest names",
        where="removal.prune_and_sweep:_garbage",
        old=" and str(name) not in named",
        new="",
    ),
    Mutant(
        lacks="a rewind fences nobody",
        where="rewind:rewind",
        old="attempts=(*body.attempts[1 - MAX_ATTEMPTS_LISTED :], mine),",
        new="attempts=body.attempts,",
    ),
    Mutant(
        lacks="a repair takes an attempt's number again",
        where="repair:repair",
        old="number = 1 + max(",
        new="number = max(",
    ),
    Mutant(
        lacks="a repair leaves the references out",
        where="repair:_entry",
        old="refs=manifest.refs,",
        new="",
    ),
)
PAGE_MUTANTS = (
    Mutant(
        lacks="a page is written after the swap",
        where="swap:Register._replace",
        old="    if pages:\n        put_all_once(self.store, pages)\n    written = self._write(new, got)\n",
        new="    written = self._write(new, got)\n    put_all_once(self.store, pages) if pages else None\n",
    ),
    Mutant(
        lacks="a sweep deletes pages that latest names",
        where="paging:sweep_pages",
        old=" and item.key not in spared",
        new="",
    ),
    Mutant(
        lacks="a sweep deletes pages that are about to be named",
        where="paging:sweep_pages",
        old=" and counter <= body.counter",
        new="",
    ),
    Mutant(
        lacks="a page whose entries changed is named again",
        where="paging:_List._in_pages",
        old="ref if now == before else now",
        new="ref",
    ),
    Mutant(
        lacks="the head moves to a page",
        where="paging:_List._too_old",
        old="if _key(item) not in self.stay:",
        new="if True:",
    ),
    Mutant(
        lacks="a commit takes the newest checkpoints for all",
        where="swap:Register._decide",
        old="self.pages.ask(body, lambda body: decide(body, now))",
        new="self.pages.ask(body, lambda body: decide(replace(body, pages=()), now))",
    ),
    Mutant(
        lacks="a claim does not look for its owner in pages",
        where="swap:Register._decide",
        old="self.pages.ask(body, lambda body: decide(body, now))",
        new="self.pages.ask(body, lambda body: decide(replace(body, owner_pages=()), now))",
    ),
)
