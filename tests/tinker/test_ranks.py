"""The base model over two ranks, each a Ray actor: against one rank, with a rank killed, and saved for the other."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
import ray
import tinker

from raycheck.tinker.engine import actor
from raycheck.tinker.engine.actor import RayEngine
from tests.support.frameworks.tinker_client import TIMEOUT_S, datum, new_model, train
from tests.support.servers.tinker_server import RunningServer, tinker_server
from tests.tinker.test_sampling import sampled

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def engines(cluster, base) -> dict[int, RayEngine]:
    return {1: RayEngine(base), 2: RayEngine(base, ranks=2)}


@pytest.fixture
def serve(engines, base, tmp_path):
    """Serves with so many ranks. All servers of a test have one bucket, and a state file each."""

    def make(ranks: int):
        state = tmp_path / f"{ranks}.sqlite"
        return tinker_server(base, f"file://{tmp_path}/bucket", state, engine=engines[ranks])

    return make


def test_what_no_node_has_room_for_is_waited_for_in_words(cluster, base, monkeypatch, caplog) -> None:
    monkeypatch.setattr(actor, "PLACED_S", 1.0)
    engine = RayEngine(base, ranks=2, num_cpus=1000)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.call("facts"), 8))

    assert "2 of 2 ranks wait until Ray has room: each needs 1000 CPUs and 0 GPUs, and the cluster has" in caplog.text


Connect = Callable[[RunningServer], tinker.ServiceClient]
UNEVEN = [datum(20, 1), datum(3, 2), datum(7, 3), datum(2, 4), datum(5, 5)]


def in_actor(engine: RayEngine, rank: int, function: Callable) -> object:
    return ray.get(engine._actors[rank].__ray_call__.remote(function), timeout=TIMEOUT_S)


def kill(engine: RayEngine, rank: int) -> None:
    os.kill(in_actor(engine, rank, lambda _: os.getpid()), signal.SIGKILL)


def test_two_ranks_compute_what_one_does(serve, connect: Connect, base) -> None:
    """Also for a batch that splits unevenly, and for one that leaves a rank without work."""
    found = {}
    for ranks in (1, 2):
        with serve(ranks) as server:
            model = new_model(connect(server), base)
            losses = train(model, range(3))
            for data in (UNEVEN, UNEVEN[:1]):
                output = model.forward_backward(data, "cross_entropy").result(TIMEOUT_S)
                losses += [value for item in output.loss_fn_outputs for value in item["logprobs"].to_numpy()]
            step = model.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
            found[ranks] = [*losses, step.metrics["grad_norm"], *train(model, range(4, 5))]

    assert found[2] == pytest.approx(found[1], rel=1e-4)


def test_each_rank_holds_half_of_the_weights(serve, engines) -> None:
    def size_here(actor) -> tuple[int, int]:
        weights = list(actor._tenants._base.model.parameters())
        return sum(weight.to_local().numel() for weight in weights), sum(weight.numel() for weight in weights)

    with serve(2):
        held = [in_actor(engines[2], rank, size_here) for rank in range(2)]

    assert sum(here for here, _ in held) == held[0][1]
    assert max(here for here, _ in held) < 0.6 * held[0][1]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_is_killed_and_the_client_goes_on(serve, engines, connect: Connect, base, rank) -> None:
    engine = engines[2]
    with serve(2) as server:
        client, life = connect(server), engine.life
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(2))
        path = model.save_state("two").result(TIMEOUT_S).path
        losses += train(model, range(2, 3))

        kill(engine, rank)
        losses += train(model, range(3, 5))

        assert engine.life == life + 1
        assert losses == train(undisturbed, range(5))
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        assert train(resumed, range(2, 5)) == losses[2:]


@pytest.mark.parametrize(
    ("first", "then"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)], ids=["2-to-1", "1-to-2"]
)
def test_a_checkpoint_loads_at_another_number_of_ranks(serve, connect: Connect, base, tmp_path, first, then) -> None:
    with serve(first) as server:
        model = new_model(connect(server), base)
        train(model, range(2))
        path = model.save_state("two").result(TIMEOUT_S).path
        weights = model.save_weights_for_sampler("two").result(TIMEOUT_S).path
        expected = train(model, range(2, 4))
    with serve(then) as server:
        client = connect(server)
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)

        assert train(resumed, range(2, 4)) == pytest.approx(expected, rel=1e-4)
        sampler = client.create_sampling_client(model_path=weights).result(TIMEOUT_S)
        assert len(sampled(sampler, 3)) == 3
        run = tmp_path / "bucket" / resumed.model_id.replace(":", ".")
        assert not list(run.rglob("*.distcp"))  # the fork refers to the first run's tensors


def test_two_ranks_sample_what_one_does(serve, connect: Connect, base) -> None:
    """One sequence leaves a rank without any; a stop ends them at different places."""
    found = {}
    for ranks in (1, 2):
        with serve(ranks) as server:
            client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
            stop = sampled(client, 1, seed=3)[0][0][2]
            found[ranks] = [sampled(client, 1), sampled(client, 5), sampled(client, 5, stop=[stop])]

    for one, two in zip(found[1], found[2], strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two]
        for (_, expected), (_, logprobs) in zip(one, two, strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-4)


def test_a_loss_that_is_not_finite_fails_on_all_ranks_and_they_go_on(serve, engines, connect: Connect, base) -> None:
    with serve(2) as server:
        life = engines[2].life
        model = new_model(connect(server), base)
        huge = [datum(4, 1), datum(4, 2, weights=[3e38, 3e38, 3e38, 3e38])]

        with pytest.raises(tinker.RequestFailedError, match="not finite"):
            model.forward_backward(huge, "cross_entropy").result(TIMEOUT_S)

        assert train(model, range(1))
        assert engines[2].life == life


def test_what_fails_on_one_rank_only_restarts_all_and_fails_its_request(serve, engines, connect: Connect, base) -> None:
    """The ranks may differ after that, and so their models are built again."""
    engine = engines[2]

    def break_pass(actor) -> None:
        actor._tenants.run_pass = lambda *_: 1 / 0

    with serve(2) as server:
        client, life = connect(server), engine.life
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(2))
        for rank in range(2):
            in_actor(engine, rank, break_pass if rank else _skip_pass)

        with pytest.raises(tinker.RequestFailedError, match="ZeroDivisionError"):
            model.forward_backward([datum(4)], "cross_entropy").result(TIMEOUT_S)

        assert engine.life == life + 1
        assert losses + train(model, range(2, 4)) == train(undisturbed, range(4))


def _skip_pass(actor) -> None:
    actor._tenants.run_pass = lambda *_: None
