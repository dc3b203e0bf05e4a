"""A rank's side of exports: what it checks first, and when it waits. The coordinator's side is export_jobs.py."""

import time
from collections.abc import Sequence

from ray.exceptions import RayError

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store.address import parse_uri
from raycheck.errors import ConfigError, StoreError
from raycheck.settings import ExportSettings
from raycheck.train.group import Group
from raycheck.train.log import logger, name_of
from raycheck.train.worker.heartbeat import FencingWatch
from raycheck.train.worker.save_queue import SaveQueue

WAIT_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 300.0
WORTH_SAYING_S = 1.0


class ExportWait:
    """By the settings of one Checkpointer; None: there are none."""

    def __init__(
        self, settings: ExportSettings | None, group: Group, models: Sequence[str], watch: FencingWatch
    ) -> None:
        """models: entries of the state with a Hugging Face configuration. Raises ConfigError when it is not clear which
        one is meant, or where it should go."""
        self._settings = settings
        self._group = group
        self._watch = watch
        self._newest: tuple[str, Progress] | None = None  # that was to be exported
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

    def follow(self, saver: SaveQueue, name: str, progress: Progress, *, is_preempted: bool) -> str | None:
        """The save of checkpoint `name`, which is to be exported, has begun: wait for what the mode says, unless
        hurried. Earlier saves have ended then, so that all ranks wait for the same. Returns the newest commit that was
        heard of. Raises what has ended this attempt meanwhile."""
        mode = self._settings.mode if self._settings is not None and not is_preempted else "async"
        before, self._newest = self._newest, (name, progress)
        if mode == "async":
            return None
        is_sync = mode == "sync"
        newest = saver.wait(up_to=saver.saves - (not is_sync))
        self._wait(self._newest if is_sync else before, but="" if is_sync else name)
        if self._watch.over is not None:
            raise self._watch.over
        return newest

    def finish(self, newest: str | None, progress: Progress) -> None:
        """Training is over, and its last step is checkpoint `newest`."""
        if self._settings is None:
            return
        if self._settings.at_end and newest is not None:
            self._newest = newest, progress
        self._wait(self._newest)

    def _wait(self, last: tuple[str, Progress] | None, *, but: str = "") -> None:
        """Until none is under way, that of a checkpoint excepted, or this attempt is over. What keeps one from ending
        is a warning, and nothing else. last: is begun anew where the coordinator was, and has forgotten it."""
        began = time.monotonic()
        if last is not None:
            self._ask("export", *last, self._settings)
        while (left := self._ask("wait_for_exports", but)) and self._watch.over is None:
            if time.monotonic() > began + WAIT_TIMEOUT_S:
                logger.warning("%s: %d exports are not waited for any more", name_of(self._group.uri), left)
                return
        if not self._group.rank and (seconds := time.monotonic() - began) > WORTH_SAYING_S:
            logger.info("%s: waited %.1f s for exports", name_of(self._group.uri), seconds)

    def _ask(self, method: str, *args: object) -> int:
        try:
            return int(self._group.ask(method, *args, timeout_s=ASK_TIMEOUT_S, what="exports"))
        except (StoreError, RayError) as error:
            logger.warning("%s: exports may be missing: %s", name_of(self._group.uri), error)
            return 0
