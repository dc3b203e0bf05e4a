"""A rank's side of exports: what it checks before them, and when it waits for them. The coordinator's is exports.py."""

import time
from collections.abc import Sequence

from raycheck.errors import ConfigError, StoreError
from raycheck.settings import ExportSettings
from raycheck.shards.progress import Progress
from raycheck.train.group import Group
from raycheck.train.log import logger
from raycheck.train.rhythm import Due

WAIT_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 300.0
WORTH_SAYING_S = 1.0


class Exporting:
    """By the settings of one Checkpointer; None: there are none."""

    def __init__(self, settings: ExportSettings | None, group: Group, models: Sequence[str]) -> None:
        """models: entries of the state with a Hugging Face configuration. Raises ConfigError when it is not clear which
        one is meant."""
        self._settings = settings
        self._group = group
        if settings is not None and (settings.entry not in models if settings.entry else len(models) != 1):
            which = repr(settings.entry) if settings.entry else "one model"
            raise ConfigError(
                f"SaveSettings(exports=...) needs {which} with a Hugging Face configuration in the state; there are "
                f"{list(models)}. Say which: ExportSettings(entry=...)"
            )

    def before(self, due: Due) -> None:
        """Such a save is about to begin."""
        if due == "export" and self._settings is not None and self._settings.mode == "auto":
            self.wait()

    def is_waited_for(self, due: Due) -> bool:
        """Whether training goes on after such a save only when it is exported."""
        return due == "export" and self._settings is not None and self._settings.mode == "sync"

    def wait(self) -> None:
        """Until none is under way. What keeps one from ending is a warning, and nothing else."""
        began = time.monotonic()
        while left := self._ask("wait_for_exports"):
            if time.monotonic() > began + WAIT_TIMEOUT_S:
                logger.warning("run %s: %d exports are not waited for any more", self._group.uri, left)
                return
        if not self._group.rank and (seconds := time.monotonic() - began) > WORTH_SAYING_S:
            logger.info("run %s: waited %.1f s for exports", self._group.uri, seconds)

    def finish(self, newest: str | None, progress: Progress, saved_as: Due) -> None:
        """Training is over, and its last step is checkpoint `newest`. Rank 0: the coordinator may end with it."""
        if self._settings is None or self._group.rank:
            return
        if self._settings.at_end and newest is not None and saved_as != "export":
            self._ask("export", newest, progress, self._settings)
        self.wait()

    def _ask(self, method: str, *args: object) -> int:
        try:
            return int(self._group.ask(method, *args, timeout_s=ASK_TIMEOUT_S, what="exports"))
        except StoreError as error:
            logger.warning("run %s: exports may be missing: %s", self._group.uri, error)
            return 0
