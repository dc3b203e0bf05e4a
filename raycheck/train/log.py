"""The logger `raycheck`: an INFO line per save, restore and commit (rank 0, coordinator); WARNING from any rank."""

import logging

from raycheck.terminal import PrintableFilter

logger = logging.getLogger("raycheck")
logger.addFilter(PrintableFilter())


def name_of(uri: str) -> str:
    """How log lines name a run: by its name alone. The line of a claim has the URI, and so do errors of the store."""
    return f"run {uri.partition('?')[0].rstrip('/').rpartition('/')[2]}"


def show_log() -> None:
    """Print INFO to stderr where nobody has configured logging at all, as in Ray's worker processes, whose output Ray
    hands on to the driver. Whoever configures `raycheck` or the root logger is left alone."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s raycheck: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
