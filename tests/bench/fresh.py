"""Processes of their own, for what must not share memory, interpreter or group with the benchmark.

They are forked from a server that has imported everything and opened nothing: importing torch takes seconds each time.
"""

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

MODULES = ("tests.bench.memory", "tests.bench.traffic", "tests.bench.training")


def processes() -> ForkServerContext:
    """Call it when the store under measure has been started: they inherit its credentials and the clients' cores."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context
