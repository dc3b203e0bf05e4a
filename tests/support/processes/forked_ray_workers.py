"""Has Ray's worker processes begin as forks of one process that has imported torch and what else they need.

Ray starts a worker by two scripts of its own, one after the other. Both import Ray, and then come torch and whatever
else the actor's class needs: two to five seconds of a core, for a process that mostly serves one test. Inside of
`forked_workers`, this file stands in for the first script: it hands its arguments, environment and open files to a
server that has imported MODULES. The server forks a template, which imports Ray, and the template forks the worker,
which runs the second script and so connects to Ray as ever. Ray's library reads its environment when it is loaded, the
job and the raylet for example, so there is a template for each environment: one for all workers of a node.

Each node has two more processes, its agents. The one that sets up runtime environments is a fork as well. The one that
serves the dashboard and exports metrics is not started: none of the tests that run here by default asks it anything, and
Ray itself goes without it where aiohttp is not installed. The same holds for what watches log files, and for the
autoscaler of a head, and for the server of a dashboard that nobody wants.

A driver that a test runs as a process (`run_script`) is forked in the same way.

Such a worker differs from one of a user's in three ways: the modules are there before they are imported, all workers hash
strings alike, and they have read botocore's data, as alike_clients.py has it. torch reads OMP_NUM_THREADS when it is imported, and Ray sets it when a worker gets its first actor
or task: so the server has 1, as Ray gives to whoever asks for one CPU. With more, ranks that share the machine's cores
wait for each other's threads at each small operation. With --all, Ray starts its workers itself.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOCKET = "RAYCHECK_TEST_FORKS"
READY = ".ready"
MODULES = (
    "aiohttp",
    "jsonschema",
    "lightning",
    "pandas",
    "psutil",
    "pyarrow.dataset",
    "pyarrow.fs",
    "pyarrow.parquet",
    "pydantic",
    "requests",
    "s3fs",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # any optimizer imports it
    "transformers.trainer",
    "raycheck.bucket.protocol.claim",
    "raycheck.group.worker.checkpointer",
    "raycheck.tinker.engine.tenants",
)
"""What workers import, but Ray."""
RAY_MODULES = ("ray.train.torch", "raycheck.on_ray.fit", "raycheck.on_ray.actors.actor_checkpointer")
AGENT_MODULES = ("ray._private.runtime_env.agent.main",)
SCRIPT = "--script"
OF_NODE = {"RAY_ADDRESS", "RAY_NODE_ID", "RAY_RAYLET_PID", "RAY_TMPDIR"}
"""What the environment of an agent or a driver has of its cluster, and modules do not read when they are imported."""
NO_AGENT = """sh -c 'for name in metrics_agent_port metrics_export_port dashboard_agent_listen_port; do
echo -1 > "$1/$name.new"; mv "$1/$name.new" "$1/${name}_$0"; done; exec cat' """
"""What Ray starts in place of a node's dashboard agent. Its arguments are the node's id and the session's folder. It says as
Ray's own in a minimal installation that there are no ports, and lives as long as its raylet."""
LONGEST_REQUEST = 1 << 20
PR_SET_PDEATHSIG = 1


@contextmanager
def forked_workers() -> Iterator[None]:
    """Makes each Ray that this process starts have forked workers. They have the environment that Ray gives them."""
    import subprocess
    import tempfile
    from unittest import mock

    with tempfile.TemporaryDirectory(prefix="rc-") as folder:
        os.environ[SOCKET] = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.environ[SOCKET])
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
            )
        try:
            with mock.patch.dict(os.environ), stood_in():
                yield
        finally:
            server.kill()
            server.wait()
            del os.environ[SOCKET]


@contextmanager
def stood_in() -> Iterator[None]:
    """Makes each Ray that this process starts ask the server, which may be another process's, for its workers."""
    from unittest import mock

    from ray._private import node, ray_constants, services

    assert SOCKET in os.environ, "nobody has started the server"
    os.environ.update(RAY_enable_pipe_based_agent_to_parent_health_check="1")  # a fork has another parent
    os.environ.update(RAY_prestart_worker_first_driver="0")  # a process for each CPU, which no test may come to use
    os.environ.update(RAY_enable_metrics_collection="0", RAY_task_events_report_interval_ms="0")  # nobody looks at them
    start, serve_api = services.start_ray_process, services.start_api_server
    with (
        mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", __file__),  # Ray joins it to a folder: it is absolute
        mock.patch.object(services, "start_ray_process", lambda command, *a, **k: start(with_agents(command), *a, **k)),
        mock.patch.object(
            services, "start_api_server", lambda of, *a, **k: (None, None) if of is False else serve_api(of, *a, **k)
        ),
        mock.patch.object(node.Node, "start_log_monitor"),
        mock.patch.object(node.Node, "start_monitor"),
    ):
        yield


def with_agents(command: list[str]) -> list[str]:
    """Return a command of Ray's. A raylet's gets other agents."""
    return [with_agent(part) for part in command]


def with_agent(part: str) -> str:
    import shlex

    option, _, agent = part.partition("=")
    if option == "--runtime_env_agent_command":
        python, *options = shlex.split(agent)
        return f"{option}={shlex.join([python, __file__, *(o for o in options if o != '-u')])}"
    if option == "--dashboard_agent_command":
        facts = dict(o.removeprefix("--").split("=", 1) for o in shlex.split(agent) if "=" in o)
        return f"{option}={NO_AGENT}{shlex.join([facts['node-id'], facts['session-dir']])}"
    return part


def script_command(module: str) -> list[str]:
    """Return the command of a process that runs a module as `python -m` does: as a fork where there is a server. The process
    ends with the fork's status, and the fork ends with the process."""
    return [sys.executable, __file__, SCRIPT, module] if SOCKET in os.environ else [sys.executable, "-m", module]


def ask_for_a_fork(arguments: list[str]) -> None:
    """Asks the server for the worker that Ray wants this process to become, and ends once it has been forked.

    A worker that is to have another Python, begins with a shell's command, or runs a sitecustomize of its node, which a
    fork would not run, is left to Ray.
    """
    option = "--serialized-runtime-env-context="
    runtime_env = json.loads(next((a.removeprefix(option) for a in arguments if a.startswith(option)), "{}"))
    is_script, is_agent = arguments[0] == SCRIPT, arguments[0].endswith("agent/main.py")
    if is_agent and (is_customized() or not Path(os.environ[SOCKET] + READY).exists()):
        os.execv(sys.executable, [sys.executable, *arguments])  # a raylet waits 15 s for its agent
    other_python = runtime_env.get("py_executable", sys.executable) != sys.executable
    if not is_script and (runtime_env.get("command_prefix") or other_python or is_customized()):
        setup = Path(arguments[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(setup), *arguments])
    os.environ.update({name: os.path.expandvars(value) for name, value in runtime_env.get("env_vars", {}).items()})
    wanted = {
        "arguments": [a for a in arguments if not a.startswith((option, "--language="))],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "kind": "script" if is_script else "agent" if is_agent else "worker",
    }
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[SOCKET])
        socket.send_fds(link, [b"0"], [0, 1, 2])
        link.sendall(json.dumps(wanted).encode() + b"\n")
        status = link.recv(1)  # until the server closes it, or the agent or the script has ended
    if is_script:
        sys.exit(status[0] if status else 1)


def is_customized() -> bool:
    """Says whether Python has run a sitecustomize that lies on PYTHONPATH."""
    ran = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    return ran is not None and str(Path(ran).parent) in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def serve(listener: socket.socket) -> None:
    """Has a worker forked whenever one is asked for. Returns in the fork, once the worker has ended."""
    load(MODULES)
    make_clients()
    Path(os.environ[SOCKET] + READY).touch()
    assert "ray" not in sys.modules
    templates: dict[tuple[str, ...], socket.socket] = {}
    while True:
        link, _ = listener.accept()
        with link:
            _, files, _, _ = socket.recv_fds(link, 1, 3)
            request = link.makefile("rb").readline()
            wanted = json.loads(request)
            environment, kind = wanted["environment"], wanted["kind"]
            raylet = environment["RAY_RAYLET_PID"] if kind == "worker" else "self"  # the others have one for all nodes
            rays = {name for name in environment if name.startswith("RAY_")} - (set() if kind == "worker" else OF_NODE)
            key = raylet, kind, *(f"{name}={environment[name]}" for name in sorted(rays))
            if key not in templates:
                for old in [old for old in templates if not Path("/proc", old[0]).exists()]:
                    templates.pop(old).close()  # its node is gone
                templates[key], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if not os.fork():
                    break
                theirs.close()
            socket.send_fds(templates[key], [request], [*files, link.fileno()])
        for file in files:
            os.close(file)
    for other in (listener, *templates.values()):
        other.close()
    for file in files:
        os.close(file)
    be_template(theirs, environment, AGENT_MODULES if kind == "agent" else RAY_MODULES)


def make_clients() -> None:
    """Make one client of S3 of each kind, so that those of the forks find what they share."""
    import asyncio

    import aiobotocore.session
    import botocore.session

    from tests.support.servers.alike_clients import make_clients_alike

    make_clients_alike()
    facts: dict[str, Any] = {"region_name": "us-east-1", "aws_access_key_id": "-", "aws_secret_access_key": "-"}
    botocore.session.Session().create_client("s3", **facts).close()

    async def make() -> None:
        async with aiobotocore.session.AioSession().create_client("s3", **facts):
            pass

    asyncio.run(make())


def be_template(requests: socket.socket, environment: dict[str, str], modules: tuple[str, ...]) -> None:
    """Forks a worker at each request. Returns in the fork, once the worker has ended."""
    from unittest import mock

    os.environ.clear()
    os.environ.update(environment)
    load(("ray",))
    with mock.patch("ray.actor.ActorClassID", IdsOfClasses):
        load(modules)
    assert draws_in_a_fork() != draws_in_a_fork(), "the forks would give their tasks the same ids"
    while True:
        request, files, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 4)
        if not request:
            os._exit(0)
        if not os.fork():
            break
        for file in files:
            os.close(file)
    requests.close()
    wanted = json.loads(request)
    if wanted["kind"] == "worker":
        os.close(files.pop())
    become(wanted, files[:3], *files[3:])  # who asks for anything else lives as long as it, for somebody watches that


class IdsOfClasses:
    """Draws what Ray's modules draw when they are imported, but not with the generator of Ray's library: its state would
    be that of all forks."""

    @staticmethod
    def from_random() -> Any:
        from ray._raylet import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def draws_in_a_fork() -> bytes:
    import ray

    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, ray.ObjectRef.from_random().binary())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as drawn:
        return drawn.read()


def load(modules: tuple[str, ...]) -> None:
    """Makes this process one that forks, with these modules."""
    import ctypes
    import gc
    import importlib
    import signal

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forks do not inherit it: they end with their Ray
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def become(wanted: dict[str, Any], files: list[int], link: int = -1) -> None:
    """Makes this fork what Ray or a test wanted to start, and runs it to its end."""
    import runpy
    import signal

    import numpy as np

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    np.random.seed()  # noqa: NPY002  # Python's own generator is seeded anew by a fork, numpy's is not
    sys.argv[:] = wanted["arguments"]
    if wanted["kind"] == "script":
        end_with(link, lambda: run_module(*sys.argv[1:]))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_module(module: str, *arguments: str) -> None:
    import runpy

    sys.argv[:] = [module, *arguments]
    with stood_in():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(link: int, run: Callable[[], None]) -> None:
    """Run a script and end this process. Who asked for it gets its status, and its own end ends the script."""
    import atexit
    import signal
    import threading
    import traceback

    asked = socket.socket(fileno=link)
    threading.Thread(target=lambda: (asked.recv(1), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    asked.send(bytes([status]))
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        ask_for_a_fork(sys.argv[1:])
