"""Makes every key in a run, relative to the run's root. No other module joins keys.

A checkpoint's name consists of its step, attempt and save number and is used once, so that no writer, however late, can
modify what another one wrote (I2).

A checkpoint may use directories of other runs in its bucket: those from which its run was forked. Such a borrowed
directory is written "../other-run/step-000000100-a3-s7", and its keys begin with "../other-run/". This relative path
(`way` in the code) leads from the root of the borrowing run to the root of the run that has the directory.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

LATEST_KEY = "latest"
CHECKPOINTS_PREFIX = "checkpoints/"
ATTEMPTS_PREFIX = "attempts/"
_NAME = re.compile(r"step-(\d{9,18})-a(\d{1,9})-s(\d{1,9})")
_ATTEMPT = re.compile(r"attempts/\d{6,9}\.json")
_WAY = re.compile(r"(?:\.\./)+([^\0]{1,900})")
_RECORD = re.compile(r"attempts/(\d{6,9})(?:\.start)?\.json")
_PAGE = re.compile(r"pages/(\d{12,19})-[0-9a-f]{8}\.json")
_SEGMENT = re.compile(r"history/\d{12,19}-[0-9a-f]{8}\.json")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


MAX_STEP = 10**9 - 1
"""The largest step of nine digits, to which names are padded."""
MANIFEST, INDEX = "manifest.json", "index"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CheckpointName:
    """A checkpoint's name: `step-000000100-a3-s7` is step 100, save 7 of attempt 3.

    Names are ordered by attempt, then save, as commits are.
    """

    attempt: int
    save: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:09d}-a{self.attempt}-s{self.save}"

    @staticmethod
    @lru_cache(maxsize=8192)  # a body of `latest` is checked at every change
    def parse(text: str) -> "CheckpointName | None":
        """Parse a name. Return None when `text` is not exactly one: then it does not belong to raycheck."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        step, attempt, save = (int(group) for group in match.groups())
        name = CheckpointName(step=step, attempt=attempt, save=save)
        return name if str(name) == text else None


def checkpoint_prefix(directory: str) -> str:
    """Return the prefix of a checkpoint's objects. Raises ValueError for what does not name a checkpoint's directory.

    So a name read from a hostile bucket cannot become a key outside the `checkpoints/` of a run. directory: a
    checkpoint's name, or a borrowed directory.
    """
    way, name = split_directory(directory)
    if CheckpointName.parse(name) is None or (way and not is_way(way)):
        raise ValueError(f"{directory!r} is not a checkpoint's name (step-SSSSSSSSS-aN-sM)")
    return f"{way}/{CHECKPOINTS_PREFIX}{name}/" if way else f"{CHECKPOINTS_PREFIX}{name}/"


def is_way(way: str) -> bool:
    """Return whether `way` is a path from one run's root to another's: "../other", "../../team/other"."""
    match = _WAY.fullmatch(way)
    return match is not None and not {"", ".", ".."} & set(match[1].split("/"))


def is_directory(text: str) -> bool:
    """Return whether `text` names a checkpoint's directory, of this run or of another one."""
    try:
        checkpoint_prefix(text)
    except ValueError:
        return False
    return True


def split_directory(directory: str) -> tuple[str, str]:
    """Return the path to the run that has the directory, empty for this run's own, and the checkpoint's name."""
    way, _, name = directory.rpartition("/")
    return way, name


def borrowed_directory(way: str, name: str) -> str:
    """Return how a run names the directory of checkpoint `name` in the run at the path `way` from its root."""
    return f"{way}/{name}" if way else name


def checkpoint_of(key: str) -> CheckpointName | None:
    """Return the checkpoint that contains the object `key`, None when no checkpoint does."""
    prefix, _, rest = key.partition("/")
    name, slash, _ = rest.partition("/")
    return CheckpointName.parse(name) if slash and f"{prefix}/" == CHECKPOINTS_PREFIX else None


def run_inside(key: str) -> str | None:
    """Return the folder of the run inside this one whose checkpoint contains the object `key`.

    None for an object that belongs to no other run: one of this run, or of someone else.
    """
    parts = key.split("/")
    for at in range(1, len(parts) - 2):
        if f"{parts[at]}/" == CHECKPOINTS_PREFIX and CheckpointName.parse(parts[at + 1]) is not None:
            return "/".join(parts[:at])
    return None


def manifest_key(name: str) -> str:
    return checkpoint_prefix(name) + MANIFEST


def index_key(name: str) -> str:
    return checkpoint_prefix(name) + INDEX


def origin_key(name: str) -> str:
    """Return the key of the object that states from which archive a checkpoint was unpacked."""
    return checkpoint_prefix(name) + "origin.json"


def component_prefix(name: str, component: str) -> str:
    """Return the prefix of a component's stock DCP directory. Raises ValueError for a name that cannot be in a key."""
    if not _COMPONENT.fullmatch(component):
        raise ValueError(f"{component!r} is not a component's name (letters, digits, '_', '.', '-')")
    return f"{checkpoint_prefix(name)}{component}/"


def metadata_key(name: str, component: str) -> str:
    return component_prefix(name, component) + ".metadata"


def shard_file(rank: int) -> str:
    """Return the file name of a rank's shard inside a component's directory, as stock DCP names it."""
    return f"__{rank}_0.distcp"


def shard_key(name: str, component: str, rank: int) -> str:
    return component_prefix(name, component) + shard_file(rank)


HOLDS_PREFIX = "holds/"


def hold_key(run_id: str, token: str) -> str:
    """Return the key of the record that a run with this id was given a hold. Raises ValueError for an invalid id."""
    if not _COMPONENT.fullmatch(run_id) or not _COMPONENT.fullmatch(token):
        raise ValueError(f"{run_id!r} is not a run's id")
    return f"{HOLDS_PREFIX}{run_id}/{token}.json"


def attempt_key(number: int) -> str:
    return f"{ATTEMPTS_PREFIX}{number:06d}.json"


def is_attempt_key(key: str) -> bool:
    """Return whether an object below `attempts/` records how an attempt ended."""
    return bool(_ATTEMPT.fullmatch(key))


def attempt_of(key: str) -> int | None:
    """Return the attempt of which an object below `attempts/` is a record; None when it is not a record."""
    match = _RECORD.fullmatch(key)
    return None if match is None else int(match[1])


def resume_key(number: int) -> str:
    return f"{ATTEMPTS_PREFIX}{number:06d}.start.json"


def slow_key(number: int) -> str:
    return f"{ATTEMPTS_PREFIX}{number:06d}.slow.json"


def alert_key(happening: str) -> str:
    """Return the key of the mark that people are told of something that happened to the run."""
    return f"alerts/{happening}.json"


def pointer_prefix(name: str) -> str:
    """Return the directory of a checkpoint's pointer, which is reported to Ray and which Ray may delete. It has no
    shards."""
    checkpoint_prefix(name)
    return f"ray/{name}"


def pointer_key(name: str) -> str:
    return pointer_prefix(name) + "/pointer.json"


def pointed_by(path: str) -> CheckpointName | None:
    """Return the checkpoint whose pointer directory `path` is, in any run; None when it is not such a directory."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return CheckpointName.parse(name) if parent.rpartition("/")[2] == "ray" else None


PAGES_PREFIX = "pages/"


def page_key(counter: int, token: str) -> str:
    """Return the key of a page. counter: that of the body of `latest` for which it is written. token: 8 hex digits."""
    return f"{PAGES_PREFIX}{counter:012d}-{token}.json"


def is_page_key(key: str) -> bool:
    return bool(_PAGE.fullmatch(key))


def counter_of_page(key: str) -> int | None:
    """Return the counter of the body for which a page was written; None for an object that is not a page."""
    match = _PAGE.fullmatch(key)
    return None if match is None else int(match[1])


HISTORY_PREFIX = "history/"


def segment_key(counter: int, token: str) -> str:
    """Return the key of a segment of the history. counter: that of the newest body of `latest` that its writer knew.
    token: 8 hex digits."""
    return f"{HISTORY_PREFIX}{counter:012d}-{token}.json"


def is_segment_key(key: str) -> bool:
    return bool(_SEGMENT.fullmatch(key))


EXPORTS_PREFIX = "exports/"


def exports_prefix(name: str) -> str:
    """Return the prefix of the Hugging Face directory `name` when a checkpoint is exported into its own run."""
    return f"{EXPORTS_PREFIX}{name}/"


EXPORT_ENDS = ("model.safetensors.index.json", "adapter_config.json")
"""The files that are written last, of a model or of an adapter: an exported directory with one of them is complete."""
EXPORT_RECORD = "raycheck.json"
"""The record in an exported directory, which names its run, its checkpoint and its files."""


def export_key(prefix: str, file: str) -> str:
    """Return the key of a file in an exported directory. prefix: empty when the store is rooted at the directory."""
    return f"{prefix.rstrip('/')}/{file}".removeprefix("/")


PUBLISHED_PREFIX = "published/"
VERSION_RECORD = "version.json"
_VERSION = re.compile(r"version-(\d{9})-[0-9a-f]{8}")


RESULT_PREFIXES = (EXPORTS_PREFIX, PUBLISHED_PREFIX)
"""What a training has made for others, which can be kept when its run is deleted."""


def versions_key(place: str) -> str:
    """Return the key of the list of published versions. place: its prefix, `published/` in a run."""
    return f"{place}versions.json"


def version_directory(number: int, token: str) -> str:
    """Return the name of a published version's directory. token: 8 hex digits, so that no two writers share one."""
    return f"version-{number:09d}-{token}"


def version_number(directory: str) -> int | None:
    """Return the number of the version in a directory of this name; None when it is not a version's directory."""
    match = _VERSION.fullmatch(directory)
    return None if match is None else int(match[1])


def version_key(place: str, directory: str, file: str) -> str:
    """Return the key of a file of a published version. Raises ValueError for what does not name a version's
    directory."""
    if version_number(directory) is None:
        raise ValueError(f"{directory!r} is not the directory of a published version")
    return f"{place}{directory}/{file}"


def readers_prefix(place: str) -> str:
    """Return the prefix of the records of who reads the published versions."""
    return f"{place}readers/"


def reader_key(place: str, reader: str) -> str:
    """Return the key of a reader's record. Raises ValueError for a name that cannot be in a key."""
    if not _COMPONENT.fullmatch(reader):
        raise ValueError(f"{reader!r} is not a reader's name (letters, digits, '_', '.', '-')")
    return f"{readers_prefix(place)}{reader}.json"


def is_file_name(name: str) -> bool:
    """Return whether this names a file in its own directory and nowhere else."""
    return name.isprintable() and name not in ("", ".", "..") and not {"/", "\\"} & set(name)


def probe_key(token: str) -> str:
    """Return the key of a scratch object, on which a claim tests the store's conditional writes."""
    return f"probes/{token}"
