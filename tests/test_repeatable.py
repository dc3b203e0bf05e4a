"""A default run gives the same answer every time: nothing in it is drawn by chance, and nothing hangs on the clock."""

import ast
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
OTHER_LANES = {"bench", "gpu", "long"}
"""Folders whose files no default run takes up."""
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path.relative_to(TESTS).parts[0] not in OTHER_LANES]
OWN_PROFILES = {
    "conftest.py": "makes the profiles",
    "bucket/protocol/test_histories.py": "only with --all, where seeds are printed",
}
UNSEEDED = {
    "golden/test_golden.py": "compares the generator that a restore has put back",
    "support/frameworks/accelerate_training.py": "draws from the generator that Accelerate's set_seed has seeded",
    "support/frameworks/torchtitan_on_cpu.py": "its generator has a seed, and only its name is the module's",
    "on_ray/actors/test_actor_checkpointer.py": "compares the generator that a restore has put back",
    "data/test_batches.py": "compares the generator of all code of a process with itself",
    "on_ray/test_cluster.py": "asks that forks draw different numbers",
    "on_ray/test_data_and_random.py": "compares the generator that a restore has put back",
    "data/test_source_proof.py": "its augmentation is what is tested, and a SystemRandom must be noticed",
    "data/test_streams.py": "gives other samples at each reading, which must be noticed",
    "state/entries/test_merged_entries.py": "compares the generators that a restore has put back",
    "state/entries/test_generators.py": "a SystemRandom, which has no state, must be refused",
    "state/test_bit_exact.py": "draws from the generators that it has seeded",
    "state/test_global_random.py": "compares the generator with itself",
    "state/test_train_state.py": "compares the generator that a restore has put back",
    "state/test_roles.py": "the number that follows from the seed that was restored",
    "support/processes/forked_ray_workers.py": "ids of Ray's classes, which must differ between forks",
}
"""Files that draw from a generator without a seed of their own, and why that changes no answer."""


def nodes(path: Path, words: str) -> Iterator[ast.AST]:
    """Yields the nodes of a file, its module first; none where the text has none of these words, a regular expression."""
    text = path.read_text()
    if re.search(words, text):
        yield from ast.walk(ast.parse(text))


def calls(path: Path, words: str) -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls of a file that has any of these words, each with the dotted name of what it calls."""
    for node in nodes(path, words):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def name_of(path: Path) -> str:
    return str(path.relative_to(TESTS))


def test_property_tests_draw_the_same_inputs_in_every_default_run(request: pytest.FixtureRequest) -> None:
    used = settings()

    assert used.derandomize == (not request.config.getoption("--search"))
    assert used.database is None
    assert used.deadline is None
    assert HealthCheck.too_slow in used.suppress_health_check, "it measures time"


def test_no_property_test_leaves_the_profile() -> None:
    found = set()
    for path in FILES:
        for name, call in calls(path, "settings|seed"):
            if name.split(".")[-1] not in ("settings", "seed") or name.startswith(("np.", "random.", "torch.")):
                continue
            own = {word.arg: ast.unparse(word.value) for word in call.keywords}
            checks = own.get("suppress_health_check", "HealthCheck.too_slow")
            is_apart = {"derandomize", "database"} & own.keys() or own.get("deadline", "None") != "None"
            if is_apart or not ("too_slow" in checks or checks == "list(HealthCheck)") or name == "seed":
                found.add(name_of(path))

    assert found == OWN_PROFILES.keys()


def draws_unseeded(name: str, call: ast.Call) -> bool:
    """Returns whether a call gives another value in each process: torch's own generator begins with a fixed seed."""
    module, _, function = name.rpartition(".")
    if function in ("Random", "default_rng", "SystemRandom"):
        return not call.args
    if module in ("random", "np.random", "numpy.random"):
        return function not in ("seed", "getstate", "setstate", "get_state", "set_state", "Generator", "PCG64")
    return name == "os.urandom" or module == "secrets"


def test_what_a_test_draws_follows_from_a_seed() -> None:
    drawing = "[Rr]andom|default_rng|secrets"
    found = {name_of(path) for path in FILES if any(draws_unseeded(name, call) for name, call in calls(path, drawing))}

    assert found == UNSEEDED.keys()


SLEEPS = {
    "bucket/store/test_ceph.py": "only with --all: kills at a moment drawn by a seed",
    "bucket/store/test_clouds.py": "holds parts under way; any length is right",
    "bucket/store/test_load.py": "only with --all: lets readers and writers run",
    "bucket/store/test_uploads.py": "lets a deadline go by that is known",
    "catalog/test_follow.py": "changes the order of two threads; any is right",
    "cli/test_top_and_completion.py": "sets two commits apart by the store's clock, which the test then reads",
    "elastic/test_matrix.py": "gives notices their time, before nodes are killed as a cloud kills them",
    "elastic/test_memory.py": "kills at a moment drawn by a seed, and gives a notice its time",
    "support/servers/http_fault_proxy.py": "makes the speed of a wire",
    "support/servers/shaped_bucket.py": "makes the latency and the speed of a network",
    "support/processes/ray_jobs.py": "makes the length of a step",
    "group/coordinator/test_wait.py": "makes a commit longer than the call that waits for it; any length is right",
    "on_ray/api/test_tune.py": "makes the length of a step",
    "published/test_kills.py": "only with --all: makes the length of a step",
    "on_ray/test_finish.py": "only with --all: a heartbeat is a second old at most",
}
"""Files with a sleep that is not the pause of a loop which polls for an event, and why no answer depends on its length."""
CLOCKS = {"time.monotonic", "time.time", "time.perf_counter", "time.process_time", "time.thread_time"}
MEASURES = {
    "bucket/store/test_clouds.py": "only with --all",
    "group/coordinator/test_store_outage.py": "only with --all",
}
"""Files with an assertion that the time since a moment is below something, and why no default run depends on it."""


def sleeps_alone(node: ast.AST, *, polls: bool = False) -> bool:
    """Returns whether there is a sleep below that no `while` repeats."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
        return not polls and ast.unparse(node.args[0]) != "0"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        polls = False
    return any(sleeps_alone(child, polls=polls or isinstance(node, ast.While)) for child in ast.iter_child_nodes(node))


def test_no_test_sleeps_and_then_looks() -> None:
    sleeping = [(path, module) for path in FILES for module in islice(nodes(path, "sleep"), 1)]
    found = {name_of(path) for path, module in sleeping if sleeps_alone(module)}

    assert found == SLEEPS.keys()


def asserts_a_duration(node: ast.AST) -> bool:
    """Returns whether it says that the time since a moment is below something."""
    return isinstance(node, ast.Compare) and any(
        isinstance(operator, ast.Lt | ast.LtE)
        and isinstance(left, ast.BinOp)
        and isinstance(left.op, ast.Sub)
        and any(isinstance(part, ast.Call) and ast.unparse(part.func) in CLOCKS for part in ast.walk(left))
        for left, operator in zip([node.left, *node.comparators], node.ops, strict=False)
    )


def test_no_test_asserts_that_something_happened_within_a_time() -> None:
    found = set()
    for path in FILES:
        asserts = [node for node in nodes(path, "|".join(CLOCKS)) if isinstance(node, ast.Assert)]
        if any(asserts_a_duration(node) for one in asserts for node in ast.walk(one)):
            found.add(name_of(path))

    assert found == MEASURES.keys()
