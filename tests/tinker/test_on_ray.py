"""The engine as a Ray actor, and the whole command: killed as the kernel kills, while a client of the SDK goes on."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import tinker

from raycheck.tinker.engine.actor import EngineGoneError, RayEngine
from tests.support.frameworks.tinker_client import TIMEOUT_S, batch, new_model, train
from tests.support.servers.ports import free_port
from tests.support.servers.tinker_server import tinker_server, wait_until
from tests.tinker.conftest import KEY

pytestmark = pytest.mark.ray
COMMAND_S = 120.0


def test_the_actor_is_killed_and_the_client_goes_on(cluster, base, connect, tmp_path) -> None:
    bucket = f"file://{tmp_path}/bucket"
    with tinker_server(base, bucket, tmp_path / "s.sqlite", engine=RayEngine(base)) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(2))
        path = model.save_state("two").result(TIMEOUT_S).path
        losses += train(model, range(2, 3))

        os.kill(pid_of_engine(server.engine), signal.SIGKILL)
        losses += train(model, range(3, 5))

        assert server.engine.life == 1
        assert losses == train(undisturbed, range(5))
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        assert train(resumed, range(2, 5)) == losses[2:]


def test_a_call_of_an_earlier_life_is_refused_and_one_call_is_blamed_for_a_death(cluster, base) -> None:
    """Else it would run in an engine that another tenant has started again, where its model is not."""
    engine = RayEngine(base)

    async def calls() -> list[object]:
        await engine.call("facts")
        ray.get(engine._actors[0].__ray_call__.remote(_let_facts_end_the_process), timeout=TIMEOUT_S)
        same_life = [engine.call("facts", life=0), engine.call("close", "x", life=0), engine.call("close", "y")]
        died = await asyncio.gather(*same_life, return_exceptions=True)
        await engine.call("close", "x")
        return [*died, *await asyncio.gather(engine.call("close", "x", life=0), return_exceptions=True)]

    errors = asyncio.run(calls())

    assert [type(error) for error in errors] == [EngineGoneError] * 4
    assert [error.was_running for error in errors] == [True, False, False, False]
    assert engine.life == 1
    asyncio.run(engine._end(1))


def _let_facts_end_the_process(actor) -> None:
    actor._tenants.facts = lambda: os._exit(1)


def pid_of_engine(engine: RayEngine) -> int:
    return int(ray.get(engine._actors[0].__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S))


@contextmanager
def command(base: str, folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """`raycheck tinker`, from its address on. It is killed in the end.

    Another Ray is said to be there, where none answers: the command starts one of its own all the same.
    """
    words = ["tinker", "--base-model", base, "--checkpoints", f"file://{folder}/bucket", "--port", str(port)]
    words += ["--state", str(folder / "s.sqlite")]
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "raycheck", *words],
            stdout=file,
            stderr=file,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "disabled",
                "RAY_ADDRESS": f"127.0.0.1:{free_port()}",
                "RAYCHECK_TINKER_API_KEY": KEY,
            },
        )
        try:
            wait_until(lambda: "Serving" in log.read_text() or process.poll() is not None, COMMAND_S)
            assert process.poll() is None, log.read_text()[-3000:]
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_command_is_killed_and_started_again_and_the_client_goes_on(base, tmp_path) -> None:
    port = free_port()
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
    with command(base, tmp_path, port):
        model = new_model(client, base)
        losses = train(model, range(2))
        model.save_state("two").result(TIMEOUT_S)
        losses += train(model, range(2, 3))
        passed = model.forward_backward(batch(3), "cross_entropy")
    with command(base, tmp_path, port) as process:
        losses.append(passed.result(COMMAND_S).metrics["loss:sum"])
        model.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
        losses += train(model, range(4, 5))
        assert losses == train(new_model(client, base), range(5))
        process.terminate()
        assert process.wait(COMMAND_S) == 0


@pytest.mark.slow
def test_the_example_kills_server_and_recipe_and_its_metrics_are_those_of_an_undisturbed_run(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.tinker_sl_loop", str(tmp_path / "work")],
        check=False,
        capture_output=True,
        text=True,
        timeout=450,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "steps 3 to 8 are those of an undisturbed run, to the last digit" in done.stdout
