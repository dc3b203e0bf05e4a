"""The logger `raycheck`, and the format of its lines.

The coordinator and rank 0 write an INFO line for each save, restore and commit; a WARNING may come from any rank.
"""

import logging

from raycheck.bucket.store.address import shown_uri
from raycheck.terminal import PrintableFilter

logger = logging.getLogger("raycheck")
logger.addFilter(PrintableFilter())


def event(what: str, *, run: str | None = None, **fields: object) -> str:
    """Return a log line: what happened, then `name=value` for each field, then the run.

    A field that is None is omitted, a float has three decimals, and a text with spaces is quoted, so that a line can be
    searched and split. run: the run's URI; its query, which may contain settings, is removed.

        logger.info(event("committed", step=120, attempt=3, blocked_s=0.0123, run="s3://bucket/run?endpoint=..."))
        committed step=120 attempt=3 blocked_s=0.012 run=s3://bucket/run
    """
    if run is not None:
        fields["run"] = shown_uri(run)
    return " ".join([what, *(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)])


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and not any(map(str.isspace, text)) else f'"{text}"'


def show_log() -> None:
    """Print INFO lines to stderr if nobody has configured logging.

    This is the case in Ray's worker processes, whose output Ray forwards to the driver. An existing configuration of
    the logger `raycheck` or of the root logger is left unchanged.
    """
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s raycheck: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
