"""Examines a bucket before anybody trusts it with a training: the public `examine_bucket`.

The checks are those that `raycheck.fit`, every node and every coordinator make, and more: what only costs money, and
what only time shows. All of them work on scratch objects below `probes/`, which they remove.
"""

import socket
from collections.abc import Callable, Iterable, Iterator

from raycheck.bucket.diagnosis.checks import (
    CONDITIONS,
    check_checksums,
    check_conditions,
    check_copies,
    check_endpoint,
    check_parts,
    check_uploads,
    raced,
    rules_of,
)
from raycheck.bucket.diagnosis.finding import BucketFinding, any_wrong, found
from raycheck.bucket.diagnosis.race import by_threads, race
from raycheck.bucket.diagnosis.racing_process import by_processes
from raycheck.bucket.diagnosis.rules import judge
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of
from raycheck.bucket.store.bucket_rules import BucketRules
from raycheck.bucket.store.retry import noting_repeats
from raycheck.catalog.doctor.plan import SavePlan, cost_of_saves, interval, plan_of_run, with_interval
from raycheck.catalog.doctor.speed import TRANSFER_BYTES, Speed, check_latency, measure, throttling
from raycheck.errors import ConfigError, RaycheckError, StoreError
from raycheck.on_ray.node_findings import examine_node, examine_nodes
from raycheck.storage_settings import StorageSettings
from raycheck.views.in_words import PRICE

PROCESSES, ROUNDS = 4, 5
NEEDS_RIGHTS = "not examined: it needs the rights that are missing"
OnFinding = Callable[[BucketFinding], object]


def examine_bucket(
    uri: str,
    storage: StorageSettings | None = None,
    *,
    address: str | None = None,
    plan: SavePlan | None = None,
    transfer_bytes: int = TRANSFER_BYTES,
    price: float = PRICE,
    on_finding: OnFinding = lambda _: None,
) -> tuple[BucketFinding, ...]:
    """Examine a place for runs: a bucket, a prefix, or a run. Return what was found, in the order of the checks.

    storage: how to access the bucket; it overrides the URI. address: a Ray cluster, whose nodes make the checks of a
    node too. plan: the saves to compute the cost of; by default those of the run at `uri`, if there is one.
    transfer_bytes: the size of the object with which throughput is measured. price: dollars for a GiB and month.
    on_finding: called with each finding as soon as there is one.

    Scratch objects below `probes/` are written and removed. If the place cannot be reached, that is the only finding.
    Raises ConfigError for an address or a number that cannot be, and for a Ray cluster that does not answer.
    """
    if transfer_bytes < 1:
        raise ConfigError(f"transfer_bytes={transfer_bytes!r}: give a number of bytes above 0")
    store, findings = open_store(uri, storage), []
    with noting_repeats() as repeats:
        for finding in _findings(store, address, plan, transfer_bytes, price=price):
            findings.append(finding)
            on_finding(finding)
    if store.endpoint and any(finding.name == "latency" for finding in findings):
        findings.append(throttling(repeats))
        on_finding(findings[-1])
    return tuple(findings)


def _findings(
    store: Store, address: str | None, plan: SavePlan | None, transfer_bytes: int, *, price: float
) -> Iterator[BucketFinding]:
    reached = found("endpoint", lambda: _check_reach(store))
    yield from reached
    if any_wrong(reached):
        return
    here = examine_node(store, node=socket.gethostname())
    yield from here
    if address is not None:
        yield from examine_nodes(store.uri, address)
    lacks_rights = any(finding.name == "rights" for finding in here)
    rules, judged = _rules(store, lacks_rights=lacks_rights)
    yield from judged
    if lacks_rights:
        yield BucketFinding(name="all else", state="unknown", text=NEEDS_RIGHTS)
        return
    if not any(finding.name == CONDITIONS for finding in here):  # which are wrong then
        yield from found(CONDITIONS, lambda: check_conditions(store))
        yield from found("atomicity", lambda: _check_race(store))
    yield from found("objects in parts", lambda: check_parts(store))
    yield from found("unfinished uploads", lambda: check_uploads(store))
    yield from found("checksums", lambda: check_checksums(store))
    yield from found("server-side copies", lambda: check_copies(store))
    yield from found("latency", lambda: check_latency(store))
    speed: list[Speed] = []

    def check_throughput() -> Iterable[BucketFinding]:
        measured, finding = measure(store, transfer_bytes)
        speed.append(measured)
        yield finding

    yield from found("throughput", check_throughput)
    plan = plan or plan_of_run(store)
    if plan is not None and speed:
        yield from interval(plan, speed[0])
        yield from cost_of_saves(with_interval(plan, speed[0]), store, rules, price=price)


def _check_reach(store: Store) -> Iterator[BucketFinding]:
    """Check that the place answers, and say what to look at if it does not."""
    try:
        yield from check_endpoint(store)
    except StoreError as error:
        cure = "Check the address, and from this machine the network to it: the endpoint, a proxy, a firewall"
        yield BucketFinding(name="endpoint", state="wrong", text=str(error), cure=cure)


def _check_race(store: Store) -> Iterator[BucketFinding]:
    """Let processes race, as two drivers would. A store in memory has one process."""
    if kind_of(store.uri) == "memory":
        yield raced(race(store, by_threads(store), rounds=ROUNDS), "threads", rounds=ROUNDS)
        return
    with by_processes(store, PROCESSES) as writers:
        yield raced(race(store, writers, rounds=ROUNDS), "processes", rounds=ROUNDS)


def _rules(store: Store, *, lacks_rights: bool) -> tuple[BucketRules, tuple[BucketFinding, ...]]:
    try:
        rules = rules_of(store)
    except RaycheckError as error:
        if lacks_rights:
            return BucketRules(), (BucketFinding(name="the bucket's rules", state="unknown", text=NEEDS_RIGHTS),)
        return BucketRules(), (BucketFinding(name="the bucket's rules", state="wrong", text=str(error)),)
    return rules, tuple(judge(rules, store.root_path)) if store.endpoint else ()
