"""Determines the kind of source at an address from the names of its files, and reads it.

A folder that only leads to another one, such as a Ray Train experiment, is followed; each such step becomes a note.
"""

from collections.abc import Callable
from dataclasses import replace

from raycheck.bucket.format.object_keys import MANIFEST
from raycheck.catalog.download_safetensors import RECORD
from raycheck.catalog.importing.dcp_directory import METADATA, read_dcp_directory
from raycheck.catalog.importing.hugging_face import BINARY, SAFETENSORS, read_hugging_face
from raycheck.catalog.importing.rank_files import RANK_FILE, read_rank_files
from raycheck.catalog.importing.ray_train import has_checkpoints, latest_checkpoint
from raycheck.catalog.importing.single_file import read_single_file
from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState
from raycheck.errors import ConfigError

READERS: dict[str, Callable[[SourceFiles, ReadSettings], SourceState]] = {
    "dcp": read_dcp_directory,
    "huggingface": read_hugging_face,
    "torch": read_single_file,
    "lightning": read_single_file,
    "fsdp": read_rank_files,
}
"""Kinds that --as may name. A Ray Train directory contains one of them and is detected automatically."""
_TORCH = (".pt", ".pth", ".ckpt", ".bin")


def read_source(files: SourceFiles, settings: ReadSettings, *, kind: str | None = None) -> SourceState:
    """Read the source at this address. kind: the kind to read it as; None: decide by the names of the files.

    Raises ConfigError, which says what to do instead, for what cannot be imported.
    """
    if kind is not None and kind not in READERS:
        raise ConfigError(f"kind={kind}: there are {', '.join(READERS)}")
    notes: list[str] = []
    step = None
    for _ in range(4):  # experiment, checkpoint, folder in it
        found = kind or kind_of_source(files)
        if found in READERS and not _leads_on(files, found):
            files = _one_file(files, found)
            state = READERS[found](files, settings)
            said = state.step if state.step is not None else step
            return replace(state, notes=(*notes, *state.notes), step=said)
        if has_checkpoints(files):
            chosen = latest_checkpoint(files)
            notes.append(chosen.note)
            files, step = chosen.files, chosen.step
        else:
            files = files.below("checkpoint/")
    raise ConfigError(f"{files}: this is not a checkpoint that can be imported. Name a single one")


def kind_of_source(files: SourceFiles) -> str:
    """Return the kind of a source: one of READERS, or "ray". Raises ConfigError for a kind that cannot be imported."""
    if files.only:
        return _kind_of_file(files)
    top = {name for name in files.sizes if "/" not in name}
    _refuse_others(files, top)
    if METADATA in top or (MANIFEST in top and any(f"{name}/{METADATA}" in files.sizes for name in files.folders())):
        return "dcp"
    if any(RANK_FILE.fullmatch(name) for name in top):
        return "fsdp"
    weights = {*SAFETENSORS, *BINARY} & top or any(name.endswith(".safetensors") for name in top)
    if weights or {"snapshots", "refs"} <= set(files.folders()):
        return "huggingface"
    if any(name.endswith(_TORCH) for name in top):
        return "torch"
    if has_checkpoints(files) or "checkpoint" in files.folders():
        return "ray"
    raise ConfigError(
        f"{files}: nothing here can be imported. It has {', '.join(sorted(top)[:8]) or 'no files'}"
        f"{' and ' + ', '.join(files.folders()[:8]) + '/' if files.folders() else ''}. raycheck imports directories of "
        "torch DCP, Hugging Face, Ray Train and FSDP ranks, and files of torch.save and Lightning"
    )


def _kind_of_file(files: SourceFiles) -> str:
    if files.only.endswith(".safetensors"):
        return "huggingface"
    return "torch"


def _refuse_others(files: SourceFiles, top: set[str]) -> None:
    names = files.sizes
    if "latest" in top and any(name.startswith("checkpoints/step-") for name in names):
        raise ConfigError(
            f"{files} is already a raycheck run: start from it with fit(resume=...), which takes its address"
        )
    if RECORD in top:
        raise ConfigError(
            f"{files} was written by raycheck download in the format safetensors, which is for other programs: what is "
            "in values.json has lost its types. Download the checkpoint in the format dcp, and import that; or name "
            "one file, to import its tensors alone"
        )
    ends = ("_optim_states.pt", "zero_to_fp32.py", "mp_rank_00_model_states.pt")
    is_model = bool({*SAFETENSORS, *BINARY} & top)
    if not is_model and any(name.endswith(ends) for name in names):
        raise ConfigError(
            f"{files} is a checkpoint of DeepSpeed, whose files only unrestricted pickle can load; raycheck never "
            "does that. If you trust it, convert it with the script in it: python zero_to_fp32.py . "
            "weights, and import the folder weights"
        )
    if any(name.startswith("adapter_model.") for name in top) and not {*SAFETENSORS, *BINARY} & top:
        raise ConfigError(
            f"{files} is a PEFT adapter without its base model. Load both with peft, and save the state dict of "
            "the whole: torch.save({'model': model.state_dict()}, file)"
        )


def _leads_on(files: SourceFiles, kind: str) -> bool:
    """Return whether the requested kind is further down, in a folder of Ray's."""
    if files.only or kind == "huggingface":
        is_here = bool(files.only) or any(
            "/" not in name and name.endswith((".safetensors", ".bin")) for name in files.sizes
        )
        return not is_here and "snapshots" not in files.folders() and _is_rays(files)
    is_here = any("/" not in name and (name == METADATA or name.endswith(_TORCH)) for name in files.sizes)
    return not is_here and _is_rays(files)


def _is_rays(files: SourceFiles) -> bool:
    return has_checkpoints(files) or "checkpoint" in files.folders()


def _one_file(files: SourceFiles, kind: str) -> SourceFiles:
    """Return the only torch.save file in a folder."""
    if kind not in ("torch", "lightning") or files.only:
        return files
    found = [name for name in files.sizes if "/" not in name and name.endswith(_TORCH)]
    chosen = [name for name in found if name in ("checkpoint.pt", "checkpoint.ckpt")] or found
    if len(chosen) != 1:
        raise ConfigError(f"{files} has several files of torch.save ({', '.join(found[:8])}): name one")
    return files.one(chosen[0])
