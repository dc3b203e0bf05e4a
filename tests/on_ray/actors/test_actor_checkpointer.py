"""A group of actors that a driver leads: what they, the driver and other actors hold comes back as one."""

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import ray.cloudpickle
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import raycheck
from raycheck.bucket.diagnosis.checks import check_rules
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.examples import grpo
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.ray_cluster import wait_for
from tests.support.processes.replicated_rank import Holder
from tests.support.processes.reused_processes import reused
from tests.support.servers.http_fault_proxy import fault_proxy
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
STEPS = 30


@pytest.fixture(scope="module")
def example(cluster: None) -> None:
    ray.cloudpickle.register_pickle_by_value(grpo)


@pytest.fixture(scope="module")
def undisturbed(example: None, s3: str) -> list[float]:
    """The losses of the example, which nobody has disturbed."""
    return run(join_uri(s3, uuid4().hex))


def run(uri: str) -> list[float]:
    with tempfile.TemporaryDirectory() as meet:
        return grpo.main(uri, STEPS, meet)


@pytest.mark.parametrize(
    "victim",
    ["policy-0", "policy-1", "sampler", "prompts"],
)
@pytest.mark.slow
def test_whatever_actor_is_killed_all_goes_on_to_the_last_bit(undisturbed: list[float], s3: str, victim: str) -> None:
    name = uuid4().hex
    with fault_proxy(s3) as proxy:
        held = proxy.rule("hold", "PUT", "step-000000008-a1-.*manifest.json")
        training = InThread(lambda: run(join_uri(proxy.uri, name)))
        held.wait()
        ray.kill(ray.get_actor(f"{victim}-{grpo.MAX_FAILURES}"))
        held.release()
        losses = training.join()

    assert losses == undisturbed
    body = assert_invariants(open_store(join_uri(s3, name)))
    first, again = (attempt.restore_key for attempt in body.attempts)
    assert first is None
    assert again.startswith("step-0000000")
    assert body.entry(body.head).step == STEPS
    assert [entry.metrics.keys() for entry in body.live] == [{"reward"}] * 2


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A run in a folder, which costs less than one in a bucket."""
    return f"file://{tmp_path}/run"


@ray.remote(num_cpus=0)
class Rank:
    """Holds a model that is alike on all ranks."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.handed_on: list[int] = []

    def set(self, value: float) -> None:
        torch.nn.init.constant_(self.model.weight, value)

    def get(self) -> tuple[float, list[int]]:
        return self.model.weight[0, 0].item(), self.handed_on


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "as a tensor": torch.tensor([self.count])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["as a tensor"].item() == state["count"]
        self.count = state["count"]


@pytest.fixture(scope="module")
def pool(cluster: None) -> list[Any]:
    """Returns two actors for the whole module, since starting one takes seconds."""
    return [Rank.remote(), Rank.remote()]


@pytest.fixture
def actors(pool: list[Any]) -> list[Any]:
    return afresh(pool)


def afresh(actors: list[Any]) -> list[Any]:
    ray.get([actor.begin.remote() for actor in actors])
    return actors


def led(
    actors: list[Any], uri: str, *, every_steps: int = 2, every_epochs: int | None = None, **options: Any
) -> raycheck.ActorCheckpointer:
    settings = raycheck.SaveSettings(every_steps=every_steps, every_epochs=every_epochs)
    return raycheck.ActorCheckpointer(actors, lambda actor: {"model": actor.model}, uri, settings, **options)


def train(actors: list[Any], ckpt: raycheck.ActorCheckpointer, steps: int) -> None:
    """Train so that every weight is the number of the step that set it."""
    at = ckpt.restore()
    for step in range(at.step + 1, at.step + steps + 1):
        ray.get([actor.set.remote(step) for actor in actors])
        ckpt.end_step({"loss": torch.tensor(0.5)}, tokens=10, episodes=2)


def test_what_the_driver_and_other_actors_hold_is_of_the_same_step(actors: list[Any], s3: str) -> None:
    uri, counter = join_uri(s3, uuid4().hex), Counter.remote()
    data = raycheck.Batches(range(10), global_batch=2, rank=0, world_size=1)
    own: dict[str, Any] = {"seen": []}
    with led(actors, uri, state={"counter": counter, "data": data, "own": own}) as ckpt:
        ckpt.restore()
        for step, (batch, _) in enumerate(zip(data.loader(0), range(3), strict=False), start=1):
            own["seen"] += batch.tolist()
            ray.get([counter.add.remote(), *(actor.set.remote(step) for actor in actors)])
            ckpt.end_step(tokens=10, episodes=2)
    seen, own["seen"] = own["seen"], []
    counter = Counter.remote()
    afresh(actors)
    data = raycheck.Batches(range(10), global_batch=2, rank=0, world_size=1)

    with led(actors, uri, state={"counter": counter, "data": data, "own": own}) as ckpt:
        at = ckpt.restore()

    assert (at.step, at.epoch_step, at.samples, at.tokens, at.episodes) == (3, 3, 6, 30, 6)
    assert own == {"seen": seen}
    assert ray.get(counter.state_dict.remote())["count"] == 3
    assert [value for value, _ in ray.get([actor.get.remote() for actor in actors])] == [3.0, 3.0]
    assert len(list(data.loader(0))) == 2


@pytest.mark.parametrize("raises", [False, True])
def test_the_metrics_of_every_step_are_in_the_history_whether_it_saved_or_not(
    actors: list[Any], uri: str, raises: bool
) -> None:

    def lead() -> None:
        with led(actors, uri, every_steps=3) as ckpt:
            ckpt.restore()
            for step in range(1, 6):
                ckpt.end_step({"loss": torch.tensor(1 / step), "reward": float("nan") if step == 3 else 1 / step})
            if raises:
                raise KeyError("a bug")

    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        lead()

    found = {line.name: line for name in ("loss", "reward") for line in raycheck.open_run(uri).history().curve(name)}
    assert found["loss"].steps == found["reward"].steps == (1, 2, 3, 4, 5)
    assert found["loss"].values == tuple(torch.tensor([1 / step for step in range(1, 6)]).tolist())
    assert [str(value) for value in found["reward"].values] == ["1.0", "0.5", "nan", "0.25", "0.2"]


def test_the_driver_s_random_state_comes_back_and_what_the_checkpoint_does_not_have_stays_and_is_named(
    actors: list[Any], uri: str
) -> None:
    with led(actors, uri) as ckpt:
        train(actors, ckpt, 2)
    expected = random.random(), torch.rand(1).item()
    random.seed(0)
    torch.manual_seed(0)
    own = {"seen": [7]}

    with led(actors, uri, state={"own": own}) as ckpt:
        at = ckpt.restore()

        assert (random.random(), torch.rand(1).item()) == expected
    assert at.step == 2
    assert at.report.fresh == ("own (not in this checkpoint)",)
    assert own == {"seen": [7]}


def test_what_is_done_at_an_epoch_s_end_is_saved_with_it(actors: list[Any], uri: str) -> None:
    own = {"evaluated": 0}
    with led(actors, uri, every_steps=2, every_epochs=1, state={"own": own}) as ckpt:
        train(actors, ckpt, 2)
        own["evaluated"] = 1
        ckpt.end_epoch()
    own["evaluated"] = 0

    with led(actors, uri, state={"own": own}) as ckpt:
        at = ckpt.restore()

    assert own == {"evaluated": 1}
    assert (at.step, at.epoch, at.epoch_step) == (2, 1, 0)
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [2]


def test_weights_alone_are_restored_and_handed_on_by_every_actor(actors: list[Any], uri: str) -> None:
    own = {"seen": [1]}
    with led(actors, uri, state={"own": own}) as ckpt:
        train(actors, ckpt, 2)
    own["seen"] = [2]
    afresh(actors)

    with led(actors, uri, state={"own": own}) as ckpt:
        at = ckpt.restore(only=["model"], then=lambda actor, at: actor.handed_on.append(at.tensors))

    assert at.step == 0
    assert own == {"seen": [2]}
    assert ray.get([actor.get.remote() for actor in actors]) == [(2.0, [2])] * 2


def test_an_actor_that_was_replaced_in_the_same_driver_takes_part(actors: list[Any], uri: str) -> None:
    actors = [actors[0], Rank.remote()]
    with pytest.raises(ray.exceptions.RayActorError):
        kill_and_train_on(actors, led(actors, uri), uri)
    actors[1] = Rank.remote()

    with led(actors, uri) as ckpt:
        train(actors, ckpt, 2)

    assert assert_invariants(open_store(uri)).live[-1].step == 4


def kill_and_train_on(actors: list[Any], ckpt: raycheck.ActorCheckpointer, uri: str) -> None:
    with ckpt:
        train(actors, ckpt, 2)
        wait_for(lambda: raycheck.open_run(uri).checkpoints, within_s=60, why="the first commit")
        ray.kill(actors[1])
        keep_stepping(ckpt)


def keep_stepping(ckpt: raycheck.ActorCheckpointer) -> None:
    """End steps until one of them raises."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.1)
        ckpt.end_step()


def step_until_told(ckpt: raycheck.ActorCheckpointer) -> None:
    with ckpt:
        keep_stepping(ckpt)


def test_another_driver_that_takes_the_run_over_ends_this_one(actors: list[Any], s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    first = led(actors, uri)
    train(actors, first, 2)
    other = raycheck.adapters.start_coordinator(uri, owner="other")
    ray.get(other.claim.remote("another group", 2))

    with pytest.raises(raycheck.errors.FencedError):
        step_until_told(first)


def test_an_actor_s_state_is_an_entry_in_any_rank_s_state(cluster: None, uri: str) -> None:
    counter = Counter.remote()
    ray.get([counter.add.remote() for _ in range(3)])
    holders = with_counter(uri, counter)
    ray.get([holder.train_and_save.remote(1) for holder in holders])
    ray.get([holder.close.remote() for holder in holders])
    again = Counter.remote()

    ray.get([holder.close.remote() for holder in with_counter(uri, again)])

    assert ray.get(again.state_dict.remote())["count"] == 3


def with_counter(uri: str, counter: Any) -> list[Any]:
    place = partial(
        raycheck.adapters.RayGroup,
        id=uuid4().hex,
        uri=uri,
        world_size=2,
        coordinator=raycheck.adapters.start_coordinator(uri, owner=uuid4().hex),
    )
    more = {"counter": raycheck.adapters.ActorState(counter)}
    holders = [reused(Holder).remote(place(rank=rank), more=more) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in holders])
    return holders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": {"own": object()}}, r"state\['own'\] is a object without state_dict"),
        ({"state": {"model": {}}}, r"state\['model'\] is in the actors' state and in the driver's"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(actors: list[Any], uri: str, options: dict, message: str) -> None:
    with pytest.raises(raycheck.errors.ConfigError, match=message):
        led(actors, uri, **options)


def test_a_place_that_doctor_calls_wrong_is_refused_in_its_words(actors: list[Any], s3: str) -> None:
    uri = planted_bucket(s3, rules=[FROZEN_RULE])
    (finding,) = [item for item in check_rules(open_store(uri)) if item.state == "wrong"]

    with pytest.raises(raycheck.errors.ConfigError) as caught, led(actors, uri) as ckpt:
        ckpt.restore()  # the driver leaves its actors with the error, and so waits for the other one's answer

    assert finding.sentence in str(caught.value)
    assert list(open_store(uri).list_objects("")) == []


def test_an_actor_without_state_is_refused(actors: list[Any]) -> None:
    with pytest.raises(raycheck.errors.ConfigError, match="no method state_dict"):
        raycheck.adapters.ActorState(actors[0])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda: {"lock": threading.Lock()}, r"own\.lock"),
        (
            lambda: StatefulDataLoader([1, 2], shuffle=True, generator=torch.Generator()),
            "'own'.*draw from one generator",
        ),
    ],
    ids=["lock", "loader"],
)
def test_what_the_driver_could_not_save_or_restore_is_said_before_the_first_step(
    actors: list[Any], uri: str, own: Callable[[], object], message: str
) -> None:
    ckpt = led(actors, uri, state={"own": own()})

    with ckpt, pytest.raises(raycheck.errors.ConfigError, match=message):
        ckpt.restore()


def test_a_save_that_is_to_be_kept_takes_the_place_of_a_rolling_one_of_the_same_step(
    actors: list[Any], uri: str
) -> None:
    with led(actors, uri) as ckpt:
        train(actors, ckpt, 1)
        ckpt.save({"loss": 1.0}, is_rolling=True)
        ckpt.save({"loss": 2.0}, is_rolling=True)
        ckpt.save({"loss": 3.0})
        ckpt.save({"loss": 4.0})

    entries = assert_invariants(open_store(uri)).live
    assert [(entry.step, entry.rolling, entry.metrics["loss"]) for entry in entries] == [(1, False, 3.0)]


def test_a_driver_may_count_its_own_steps(actors: list[Any], uri: str) -> None:
    with led(actors, uri) as ckpt:
        ckpt.restore()
        assert [ckpt.save(step=step).result().step for step in (3, 8)] == [3, 8]
        with pytest.raises(raycheck.errors.ConfigError, match="steps never go back"):
            ckpt.save(step=7)

    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [3, 8]


def test_the_same_driver_goes_on_and_another_wish_to_resume_is_heard(actors: list[Any], uri: str) -> None:
    with led(actors, uri, resume="never") as ckpt:
        train(actors, ckpt, 4)
    with led(actors, uri, resume="never") as ckpt:
        assert ckpt.restore().step == 4
    with led(actors, uri, resume=2) as ckpt:
        assert ckpt.restore().step == 2


def test_the_drivers_own_periodic_work_goes_on_where_it_was(actors: list[Any], uri: str) -> None:
    turns = []
    for steps in (5, 4):
        evaluate = raycheck.adapters.Periodic(every_steps=3)
        with led(actors, uri, state={"evaluate": evaluate}) as ckpt:
            start = ckpt.restore().step
            for step in range(start + 1, start + steps + 1):
                ckpt.end_step()
                if evaluate.take_turn():
                    turns.append(step)

    assert turns == [3, 6, 9]


def test_a_driver_saves_at_step_0_at_listed_steps_and_when_its_function_says_so_and_waits(
    actors: list[Any], uri: str
) -> None:
    asked = []

    def when(step: int, metrics: dict[str, Any]) -> bool:
        asked.append((step, metrics["loss"]))
        return metrics["loss"] < 0.25

    settings = raycheck.SaveSettings(at_start=True, at_steps=[2], when=when)
    with raycheck.ActorCheckpointer(
        actors, lambda actor: {"model": actor.model}, uri, settings, state={"own": {"seen": [7]}}
    ) as ckpt:
        ckpt.restore()
        ckpt.wait()
        at_first = [item.step for item in raycheck.open_run(uri).checkpoints]
        for step in range(1, 6):
            ckpt.end_step({"loss": 1 / step})
        ckpt.wait()
        at_last = [item.step for item in raycheck.open_run(uri).checkpoints]

    assert (at_first, at_last) == ([0], [0, 2, 5])
    assert asked == [(step, 1 / step) for step in range(1, 6)]
    own: dict[str, Any] = {"seen": []}
    afresh(actors)
    with led(actors, uri, state={"own": own}, resume=0) as ckpt:
        assert ckpt.restore().step == 0
    assert own == {"seen": [7]}, "what the driver holds is in the checkpoint of step 0, too"


def test_a_driver_saves_at_step_0_what_the_checkpoint_of_step_0_has_not(actors: list[Any], uri: str) -> None:
    settings = raycheck.SaveSettings(at_start=True)

    def saves_of(state: dict[str, Any]) -> list[str]:
        with raycheck.ActorCheckpointer(
            actors, lambda actor: {"model": actor.model}, uri, settings, state=state
        ) as ckpt:
            ckpt.restore()
        return [item.key for item in raycheck.open_run(uri).checkpoints]

    first = saves_of({"own": {"seen": 1}})
    again = saves_of({"own": {"seen": 1}})
    more = saves_of({"own": {"seen": 1}, "more": {"best": 2}})

    assert first == again == ["step-000000000-a1-s1"], "it was saved already"
    assert more == [*first, "step-000000000-a3-s1"]


def test_a_driver_waits_for_one_save_by_its_handle(actors: list[Any], s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        with led(actors, uri, every_steps=100) as ckpt:
            train(actors, ckpt, 1)
            held = proxy.rule("hold", "PUT", "step-000000001-.*manifest.json")
            handle = ckpt.save()
            held.wait()
            before = (handle.is_done, handle.is_committed)
            with pytest.raises(raycheck.errors.SaveFailedError, match="the save of step 1 has not ended within 0 s"):
                handle.result(0)
            held.release()
            found = handle.result()
        assert (found.uri, found.key, found.step) == (uri, "step-000000001-a1-s1", 1)
        assert handle.result() == found, "after the end too"

        with led(actors, uri) as other:
            other.restore()
            with pytest.raises(raycheck.errors.ConfigError, match="earlier ActorCheckpointer"):
                handle.result()
    assert before == (False, False)


@ray.remote(num_cpus=0)
class Worker:
    """A worker of one role. Like many in RL frameworks, it has asynchronous methods too."""

    def __init__(self, role: str) -> None:
        self.begin(role)

    def begin(self, role: str) -> None:
        self.role, self.model = role, torch.nn.Linear(2, 1 if role == "critic" else 3)
        self.schedule = {"learned": 0}

    def learn(self, value: float) -> None:
        torch.nn.init.constant_(self.model.weight, value)
        self.schedule["learned"] += 1

    async def get(self) -> tuple[float, int]:
        return self.model.weight[0, 0].item(), self.schedule["learned"]


def test_a_policy_and_a_critic_are_one_checkpoint_and_each_may_grow(cluster: None, uri: str) -> None:
    own = {"seen": 0}

    def state_of(worker: Any) -> dict[str, Any]:
        return {worker.role: {"model": worker.model, "schedule": worker.schedule}}

    def group(role: str, size: int) -> list[Any]:
        return [Worker.remote(role) for _ in range(size)]

    def led_by(policies: list[Any], critics: list[Any]) -> raycheck.ActorCheckpointer:
        settings = raycheck.SaveSettings(every_steps=None)
        return raycheck.ActorCheckpointer([*policies, *critics], state_of, uri, settings, state={"own": own})

    policies, critics = group("policy", 1), group("critic", 2)
    workers = [*policies, *critics]
    with led_by(policies, critics) as ckpt:
        assert ckpt.restore().checkpoint is None
        ray.get([worker.learn.remote(3.0) for worker in policies])
        ray.get([worker.learn.remote(5.0) for worker in critics])
        own["seen"] = 7
        assert ckpt.save(step=4).result().step == 4
    own["seen"] = 0
    policies, critics = workers[:2], workers[2:]
    ray.get([worker.begin.remote("policy") for worker in policies] + [critics[0].begin.remote("critic")])

    with led_by(policies, critics * 2) as ckpt:
        at = ckpt.restore(then=lambda worker, at: None)

    assert (at.step, own) == (4, {"seen": 7})
    assert {"policy.model", "critic.model", "critic.schedule", "own"} <= set(at.report.restored)
    assert ray.get([worker.get.remote() for worker in [*policies, *critics]]) == [(3.0, 1), (3.0, 1), (5.0, 1)]
    assert {item.name for item in raycheck.open_run(uri).at(4).tensors()} >= {
        "policy.model.weight",
        "critic.model.weight",
    }
    assert_invariants(open_store(uri))
