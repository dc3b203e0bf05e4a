"""Commands that show what is committed, what is in a checkpoint, and whether it is intact. They write nothing (I8)."""

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.verify import Finding
from raycheck.catalog.listing import list_runs
from raycheck.cli.options import Json, Step, Storage, Text, Uri, out, print_json, print_table, settings_of
from raycheck.cli.progress_bar import progress_bar
from raycheck.errors import CorruptError, NotFoundError
from raycheck.published.records import PublishedVersion
from raycheck.run import CommittedCheckpoint, Run, open_run, read_readable_run
from raycheck.storage_settings import StorageSettings
from raycheck.terminal import printable
from raycheck.views.attempts import AttemptHistory
from raycheck.views.in_words import age, short_number, size, time_of

MAX_PLACES = 10
"""The maximum number of damaged places shown per object."""
MAX_ATTEMPTS = 20
"""The number of newest attempts whose start `show` prints."""


def ls(uri: Uri, as_json: Json = False, storage: Storage = None) -> None:
    """List a run's committed checkpoints, and its state. The exit code is 1 if some of them cannot be read."""
    run, problems = read_readable_run(open_store(uri, settings_of(storage)))
    if as_json:
        print_json([_facts(run, checkpoint) for checkpoint in run.checkpoints])
        _end_with(problems)
        return
    status = run.status()
    has_names = ["name"] if any(checkpoint.name for checkpoint in run.checkpoints) else []
    columns = ["", "step", *has_names, "checkpoint", "size", "committed", "age", "metrics"]
    rows = []
    for checkpoint in run.checkpoints:
        values = {**checkpoint.metrics, **checkpoint.scores}
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))
        name = [f"{checkpoint.name or ''}{_expiry(checkpoint, status.now)}"] if has_names else []
        mark = " ".join(_marks(run, checkpoint))
        when = time_of(checkpoint.committed_at), age(checkpoint.committed_at, status.now)
        rows.append((mark, checkpoint.step, *name, checkpoint.key, size(checkpoint.size_bytes), *when, metrics))
    print_table(columns, rows)
    out.print(Text(f"\n{status.text}"))
    _end_with(problems)


def show(uri: Uri, at: Step = None, as_json: Json = False, storage: Storage = None) -> None:
    """Show a run, its attempts, and one checkpoint.

    The checkpoint is the head, or the one of --at.
    """
    run, problems = _open_or_say(uri, settings_of(storage), as_json=as_json)
    checkpoint = run.head if at is None else run.at(at)
    history = run.history()
    status, head = history.status, run.head.key if run.head else None
    facts: dict[str, Any] = {"run": uri, "run_id": run.run_id, "head": head}
    facts |= {"borrowed": {way: list(names) for way, names in run.borrowed.items()}}
    facts |= {"state": status.state, "state_at": status.at, "state_text": status.text}
    facts["attempts"] = list(map(_of_attempt, history.attempts))
    if checkpoint is not None:
        facts["checkpoint"] = _facts(run, checkpoint) | _details(checkpoint)
    if (published := run.published()) is not None:
        facts["published"] = [_published(version, published.readers) for version in published.versions]
    if as_json:
        print_json(facts)
        _end_with(problems)
        return
    out.print(Text(f"run {shown_uri(uri)}"))
    out.print(Text(f"id {run.run_id}, head {head or '-'}, {len(run.checkpoints)} checkpoints"))
    out.print(Text(f"{status.text}\n"))
    for way, names in run.borrowed.items():
        out.print(Text(f"uses {len(names)} checkpoint(s) of {way}: {', '.join(names[:3])}\n"))
    rows = []
    for item in history.attempts:
        when = time_of(item.began_at), age(item.began_at, status.now)
        rows.append((item.number, item.workers, item.restored or "fresh start", item.last_save, *when))
    print_table(("attempt", "workers", "restored", "saves", "claimed", "age"), rows)
    for item in history.attempts[-MAX_ATTEMPTS:]:
        if item.resume is not None:
            out.print(Text(f"\nattempt {item.number} resumed {item.resume}"))
    if checkpoint is not None:
        out.print(Text(f"\ncheckpoint {checkpoint.key}"))
        for name, value in facts["checkpoint"].items():
            if name in ("world_size", "per_rank"):
                continue  # "workers" says both
            label = re.sub("^is_|_(at|bytes|s)$", "", name).replace("_", " ")
            out.print(Text(f"  {label:<14} {_in_words(name, value, now=status.now)}"))
    if published is not None:
        out.print(Text("\npublished"))
        lines = []
        for item in facts["published"]:
            patch = "-" if item["patch_bytes"] is None else size(item["patch_bytes"])
            whole = size(item["whole_bytes"]) if item["is_whole"] else "-"
            old = age(item["published_at"], status.now)
            lines.append((item["version"], item["step"], whole, patch, old, ", ".join(item["readers"]) or "-"))
        print_table(("version", "step", "whole", "patch", "age", "readers"), lines)
    _end_with(problems)


def _of_attempt(item: AttemptHistory) -> dict[str, Any]:
    return {
        "number": item.number,
        "world_size": item.world_size,
        "restore_key": item.restored,
        "last_save": item.last_save,
        "claimed_at": item.began_at,
        "resume": None if item.resume is None else _fields(item.resume),
    }


def _end_with(problems: tuple[str, ...]) -> None:
    """Print what of the run could not be read, and end with exit code 1 if that is anything."""
    for problem in problems:
        print(printable(f"raycheck: {problem}"), file=sys.stderr)  # noqa: T201  not among the data
    if problems:
        raise typer.Exit(1)


def _published(version: PublishedVersion, readers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "version": version.number,
        "step": version.step,
        "checkpoint": version.checkpoint,
        "is_whole": version.is_whole,
        "whole_bytes": version.whole_bytes,
        "patch_bytes": None if version.base is None else version.patch_bytes,
        "published_at": version.published_at,
        "readers": sorted(name for name, directory in readers.items() if directory == version.directory),
    }


def verify(uri: Uri, at: Step = None, as_json: Json = False, storage: Storage = None) -> None:
    """Read all checkpoints and compare their checksums.

    With --at only that checkpoint is read. Every object's size and checksums are compared with what was committed.
    Damage is reported by rank, component, tensor, and 4 MiB block, and the exit code is 1.
    """
    run = open_run(uri, settings_of(storage))
    checkpoints = run.checkpoints if at is None else (run.at(at),)
    if not checkpoints:
        raise NotFoundError(f"{shown_uri(uri)}: the run has no committed checkpoint to verify")
    found = _verified(checkpoints)
    bad = [finding for _, finding in found if finding.problem]
    if as_json:
        print_json(
            {
                "checkpoints": [item.key for item in checkpoints],
                "objects": len(found),
                "bytes": sum(finding.size_bytes for _, finding in found),
                "problems": [asdict(finding) for finding in bad],
            }
        )
    else:
        for key in dict.fromkeys(key for key, _ in found):
            own = [finding for name, finding in found if name == key]
            problems = [finding for finding in own if finding.problem]
            total = size(sum(finding.size_bytes for finding in own))
            out.print(Text(f"{'BAD' if problems else 'ok '}  {key}  {len(own)} objects, {total}"))
            for finding in problems:
                out.print(Text(f"     {finding.key}: {finding.problem}"))
                for place in finding.where[:MAX_PLACES]:
                    out.print(Text(f"       {place}"))
                if len(finding.where) > MAX_PLACES:
                    out.print(Text(f"       and {len(finding.where) - MAX_PLACES} more (--json has them all)"))
    if bad:
        raise typer.Exit(1)


def _verified(checkpoints: tuple[CommittedCheckpoint, ...]) -> list[tuple[str, Finding]]:
    """Return the finding for each object, with its checkpoint's key. Shows a progress bar."""
    total, done, found = sum(item.size_bytes for item in checkpoints), 0, []
    with progress_bar() as progress:
        progress(0, total)
        for item in checkpoints:
            for finding in item.verify():
                found.append((item.key, finding))
                done += finding.size_bytes
                progress(done, max(total, done))
    return found


def _open_or_say(uri: str, storage: StorageSettings | None, *, as_json: bool) -> tuple[Run, tuple[str, ...]]:
    """Return read_readable_run. If that fails, print the run's state, as in `raycheck runs`, for programs before
    raising the error."""
    try:
        return read_readable_run(open_store(uri, storage))
    except (NotFoundError, CorruptError):
        if as_json:
            for run in list_runs(uri, storage, depth=0):
                print_json({"run": uri, "state": run.state, "state_text": run.text})
        raise


def _expiry(item: CommittedCheckpoint, now: float) -> str:
    """Return the expiry of a named checkpoint as text, or "" for others, whose expiry only --json shows."""
    if item.name is None or item.expires_at is None:
        return ""
    return f" ({'expired' if item.expires_at <= now else 'expires'} {age(item.expires_at, now)})"


def _fields(resume: ResumeRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(resume).items() if name != "unknown"}


def _in_words(name: str, value: object, *, now: float) -> str:
    """Return a fact as text. The suffix of its name gives a number's unit: a time (`_at`), bytes (`_bytes`), or seconds
    (`_s`). Names inside a dict are the user's and have no such meaning."""
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_in_words('', item, now=now)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_at"):
        return f"{time_of(value)}, {age(value, now)}"
    if name.endswith("_bytes"):
        return size(value)
    return short_number(value) + (" s" if name.endswith("_s") else "")


def _marks(run: Run, checkpoint: CommittedCheckpoint) -> list[str]:
    marks = {
        "head": checkpoint == run.head,
        "pinned": checkpoint.is_pinned,
        "rolling": checkpoint.is_rolling,
        "drifted": checkpoint.is_drifted,
        "DAMAGED": checkpoint.damaged,
    }
    return [mark for mark, applies in marks.items() if applies]


def _facts(run: Run, item: CommittedCheckpoint) -> dict[str, Any]:
    return {
        "key": item.key,
        "step": item.step,
        "is_head": item == run.head,
        "size_bytes": item.size_bytes,
        "committed_at": item.committed_at,
        "expires_at": item.expires_at,
        "is_pinned": item.is_pinned,
        "name": item.name,
        "damaged": item.damaged,
        "metrics": dict(item.metrics),
        "scores": dict(item.scores),
        "refs": list(item.shares_with),
    }


def _details(item: CommittedCheckpoint) -> dict[str, Any]:
    found = item.details(values=True)
    return {
        "note": dict(found.note),
        "epoch": found.epoch,
        "samples": found.samples,
        "drifted": list(found.drifted),
        "attempt": found.attempt,
        "world_size": found.world_size,
        "per_rank": None if found.per_rank is None else list(found.per_rank),
        "workers": found.workers,
        "restored_from": _without_settings(found.restored_from),
        "trained_s": found.trained_s,
        "tensors": found.num_tensors,
        "entries": list(found.entries),
        "components": dict(found.components),
        "objects": len(found.objects) + 1,
        "blocked_s": found.blocked_s,
        "upload_s": found.upload_s,
    }


def _without_settings(origin: str | None) -> str | None:
    """Return a checkpoint's origin for display: older forks also wrote the settings of the URI."""
    return origin and " ".join(map(shown_uri, origin.split(" ")))
