"""Does a rank's part of exports: it checks them before training, and waits for them. export_jobs.py does the rest."""

import time
from collections.abc import Sequence

from ray.exceptions import RayError

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store.address import parse_uri
from raycheck.errors import ConfigError, StoreError
from raycheck.settings import ExportSettings
from raycheck.train.group import Group
from raycheck.train.log import event, logger
from raycheck.train.worker.heartbeat import FencingWatch
from raycheck.train.worker.save_queue import SaveQueue

WAIT_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 300.0
WORTH_SAYING_S = 1.0


class ExportWait:
    """Waits for exports, as the settings of one Checkpointer say; does nothing when they have no `exports`."""

    def __init__(
        self, settings: ExportSettings | None, group: Group, models: Sequence[str], watch: FencingWatch
    ) -> None:
        """models: entries of the state with a Hugging Face configuration. Raises ConfigError when it is not clear which
        one is meant, or where it should go."""
        self._settings = settings
        self._group = group
        self._watch = watch
        self._newest: tuple[str, Progress] | None = None  # name and progress of the newest save with an export
        if settings is None:
            return
        if settings.entry not in models if settings.entry else len(models) != 1:
            which = repr(settings.entry) if settings.entry else "one model"
            advice = ". Say which: ExportSettings(entry=...)" if models else ""
            raise ConfigError(
                f"SaveSettings(exports=...) needs {which} with a Hugging Face configuration in the state; there are "
                f"{list(models)}{advice}"
            )
        if settings.to is not None:
            parse_uri(settings.to)

    def follow(self, queue: SaveQueue, name: str, progress: Progress, *, is_preempted: bool) -> str | None:
        """Wait, once the save of checkpoint `name` has begun, for the exports that the mode says.

        Earlier saves have ended by then, so that all ranks wait for the same exports. is_preempted: wait for none.
        Returns the name of the newest commit, if there was one meanwhile. Raises what has ended this attempt.
        """
        mode = self._settings.mode if self._settings is not None and not is_preempted else "async"
        before, self._newest = self._newest, (name, progress)
        if mode == "async":
            return None
        is_sync = mode == "sync"
        newest = queue.wait(up_to=queue.saves - (not is_sync))
        self._wait(self._newest if is_sync else before, but="" if is_sync else name)
        if self._watch.over is not None:
            raise self._watch.over
        return newest

    def finish(self, newest: str | None, progress: Progress) -> None:
        """Wait for all exports when training is over. newest: the checkpoint of its last step."""
        if self._settings is None:
            return
        if self._settings.at_end and newest is not None:
            self._newest = newest, progress
        self._wait(self._newest)

    def _wait(self, last: tuple[str, Progress] | None, *, but: str = "") -> None:
        """Wait until no export is under way, or this attempt is over. A failure is a warning, and nothing else.

        last: the save whose export is begun again if a new coordinator does not know of it. but: a checkpoint whose
        export is not waited for.
        """
        began = time.monotonic()
        if last is not None:
            self._ask("export", *last, self._settings)
        while (left := self._ask("wait_for_exports", but)) and self._watch.over is None:
            if time.monotonic() > began + WAIT_TIMEOUT_S:
                text = "no longer waiting for exports"
                logger.warning(event(text, exports=left, waited_s=WAIT_TIMEOUT_S, run=self._group.uri))
                return
        if not self._group.rank and (seconds := time.monotonic() - began) > WORTH_SAYING_S:
            logger.info(event("waited for exports", waited_s=seconds, run=self._group.uri))

    def _ask(self, method: str, *args: object) -> int:
        try:
            return int(self._group.ask(method, *args, timeout_s=ASK_TIMEOUT_S, what="exports"))
        except (StoreError, RayError) as error:
            logger.warning(event("exports may be missing", cause=error, run=self._group.uri))
            return 0
