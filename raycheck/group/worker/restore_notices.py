"""Logs after a restore what has changed since the save, and which data does not resume where it was.

Each notice is a log line and changes nothing.
"""

from dataclasses import asdict

from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.group.group import Group
from raycheck.host import host
from raycheck.log import event, logger
from raycheck.settings import SaveSettings
from raycheck.state.preview import Preview
from raycheck.state.restore_result import RestoreReport


def say_what_changed(group: Group, manifest: Manifest, settings: SaveSettings) -> None:
    """Log which settings differ from those of the checkpoint. The script's settings always apply."""
    before, now = set(manifest.settings), set(settings.chosen)
    if before != now and not group.rank:
        new, old = (", ".join(sorted(chosen)) or "defaults" for chosen in (now - before, before - now))
        logger.info(
            event("settings since the save differ", checkpoint=manifest.key, now=new, before=old, run=group.uri)
        )


def warn_of_differences(group: Group, report: RestoreReport) -> None:
    """Warn when only one of the checkpoint and the live state has an entry or tensor."""
    if report.missing or report.unexpected or report.registered:
        text = "the checkpoint and the state differ"
        logger.warning(event(text, report=report, rank=group.rank, run=group.uri))


def warn_of_other_position(group: Group, preview: Preview, restored: Progress) -> None:
    """Warn when training resumes elsewhere than `peek` has told the script: its Batches were not restored."""
    differences = [
        f"{name}: peek() said {getattr(preview, name)}, restore() {count}"
        for name, count in asdict(restored).items()
        if getattr(preview, name) != count
    ]
    if differences:
        text = f"restored another position than was peeked at: {'; '.join(differences)}"
        logger.warning(event(text, checkpoint=preview.checkpoint, rank=group.rank, run=group.uri))


def log_what_starts_over(group: Group, restored: Progress | None) -> None:
    """Log what happens to data whose position is not in the state, and warn about an interrupted epoch of Ray Data.

    This is logged at a run's first start, and whenever it happens. It is not an error: a run of one epoch loses
    nothing, and for a run that is restarted at night, repeated samples are better than the end of the run. restored:
    None in a fresh run.
    """
    names = ", ".join(host().dataset_names())
    if group.rank or (restored is not None and restored.epoch_step == 0) or not (names or restored):
        return
    counts = {"step": restored.step, "epoch": restored.epoch, "epoch_step": restored.epoch_step} if restored else {}
    if not names:
        text = "no position in the data was restored: the script's own loader decides where it begins"
        logger.info(event(text, **counts, run=group.uri))
        return
    happens = "after a restart in mid-epoch, the epoch starts over while step and schedule continue"
    if restored is not None:
        happens = "they start this epoch over, so its samples are trained on again"
    text = (
        f"the datasets of Ray Data ({names}) cannot report their position: {happens}. To resume in mid-epoch, use "
        "raycheck.RayData(name, id=...) instead of get_dataset_shard, and add it to the state. Without it, call "
        "end_epoch() after each epoch and loop over range(at.epoch, epochs)"
    )
    logger.warning(event(text, **counts, run=group.uri))
