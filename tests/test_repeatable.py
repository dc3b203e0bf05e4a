"""A default run gives the same answer every time: nothing in it is drawn by chance, and nothing hangs on the clock."""

import ast
from collections.abc import Iterator
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
    "support/accelerate_training.py": "draws from the generator that Accelerate's set_seed has seeded",
    "support/torchtitan_on_cpu.py": "its generator has a seed, and only its name is the module's",
    "train/actors/test_actor_checkpointer.py": "compares the generator that a restore has put back",
    "train/test_batches.py": "compares the generator of all code of a process with itself",
    "train/test_cluster.py": "asks that forks draw different numbers",
    "train/test_data_and_random.py": "compares the generator that a restore has put back",
    "train/test_streams.py": "gives other samples at each reading, which must be noticed",
    "shards/entries/test_generators.py": "a SystemRandom, which has no state, must be refused",
    "shards/state/test_bit_exact.py": "draws from the generators that it has seeded",
    "shards/state/test_global_random.py": "compares the generator with itself",
    "shards/state/test_train_state.py": "compares the generator that a restore has put back",
}
"""Files that draw from a generator without a seed of their own, and why that changes no answer."""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls of a file, each with the dotted name of what it calls."""
    for node in ast.walk(ast.parse(path.read_text())):
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
        for name, call in calls(path):
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
    found = {name_of(path) for path in FILES if any(draws_unseeded(name, call) for name, call in calls(path))}

    assert found == UNSEEDED.keys()
