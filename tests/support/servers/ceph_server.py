"""Ceph RGW on a one-node cluster: a production object store, where emulators only show that they read a header.

Monitor, OSD and gateway are child processes on 127.0.0.1. Debian's packages are installed on first use, if by root.
"memstore" is fast and forgets, "bluestore" survives a kill of any daemon. Several clusters may run beside each other.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from uuid import uuid4

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.servers.debian_packages import prepare_programs
from tests.support.servers.ports import free_port

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph-authtool", "ceph")
INSTALL = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
BUCKET = "raycheck"
KEY = "demo"  # also the secret; what the other servers of the tests take, so that all live in one process
START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 60.0
Objectstore = Literal["memstore", "bluestore"]
Daemon = Literal["mon", "osd", "rgw"]
DAEMONS: tuple[Daemon, ...] = ("mon", "osd", "rgw")

# One replica on one OSD. Sockets for administration would only run into the limit on the length of their paths. One
# keyring for all: radosgw does not come up without cephx. What waits for peers that are not there waits shortly.
_CONF = """
[global]
fsid = {fsid}
mon host = {mon_host}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}
admin socket =
log file = {folder}/$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
ms max backoff = 0.5
objecter tick interval = 1
objecter timeout = 2
paxos propose interval = 0.05
mon allow pool size one = true
mon max pg per osd = 2000
[mon]
mon data = {folder}/mon
mon initial members = a
mon data avail crit = 1
mon data avail warn = 2
[osd]
osd data = {folder}/osd
osd objectstore = {objectstore}
memstore device bytes = 4G
bluestore block size = 8G
osd memory target = 1G
osd op num shards = 2
[client]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
rgw dynamic resharding = false
"""


class Cluster:
    """Three daemons on one folder, which can be killed and started again. `uri`: a bucket on it. more: sections added
    to Ceph's configuration, the last word on a setting."""

    def __init__(self, folder: Path, objectstore: Objectstore, more: str = "") -> None:
        self._folder = folder
        self._conf = folder / "ceph.conf"
        self._fsid = str(uuid4())
        self._port, v2, v1 = (free_port() for _ in range(3))
        self._mon_host = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        self._conf.write_text(
            _CONF.format(
                fsid=self._fsid, mon_host=self._mon_host, folder=folder, objectstore=objectstore, port=self._port
            )
            + more
        )
        self._running: dict[Daemon, subprocess.Popen[bytes]] = {}
        self.uri = f"s3://{BUCKET}?endpoint_override=127.0.0.1:{self._port}&scheme=http&region=us-east-1"

    def create(self) -> None:
        """All that is done once: the monitor's and the OSD's folders, a user, the bucket."""
        monmap, keyring, osd = self._folder / "monmap", self._folder / "keyring", str(uuid4())
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        self._command("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._mon_host, monmap)
        for name in ("mon.", "client.admin", "osd.0"):
            caps = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
            self._command(
                "ceph-authtool", *("--create-keyring",) * (name == "mon."), keyring, "--gen-key", "-n", name, *caps
            )
        self._command("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.start("mon")
        self._command("ceph", "osd", "new", osd)
        self._command("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.start("osd", "rgw")
        self.wait_until_up()
        user = ("--uid=raycheck", "--display-name=raycheck", f"--access-key={KEY}", f"--secret={KEY}")
        self._command("radosgw-admin", "user", "create", *user)
        self._create_bucket()

    def start(self, *names: Daemon) -> None:
        commands: dict[Daemon, tuple[str, ...]] = {
            "mon": ("ceph-mon", "-i", "a"),
            "osd": ("ceph-osd", "-i", "0"),
            "rgw": ("radosgw", "-n", "client.admin"),
        }
        for name in names:
            # However this process dies, it takes the daemon along.
            command = ["setpriv", "--pdeathsig", "KILL", *commands[name], "-f", "-c", self._conf]
            with (self._folder / f"{name}.out").open("ab") as out:
                self._running[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )

    def kill(self, *names: Daemon) -> None:
        """SIGKILL, to the daemons' whole process groups, all at once. Returns when they are gone."""
        killed = [self._running.pop(name) for name in names if name in self._running]
        for process in killed:
            os.killpg(process.pid, signal.SIGKILL)
        for process in killed:
            process.wait(COMMAND_TIMEOUT_S)

    def wait_until_up(self) -> None:
        """Until the gateway answers, which it does once monitor and OSD do."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended:
                raise RuntimeError(f"Ceph: {', '.join(ended)} ended by itself\n{self.logs()}")
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"Ceph RGW did not listen within {START_TIMEOUT_S:.0f} s\n{self.logs()}")

    def logs(self) -> str:
        files = sorted([*self._folder.glob("*.out"), *self._folder.glob("*.log")])
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def _command(self, program: str, *arguments: object) -> None:
        if program not in ("monmaptool", "ceph-authtool"):
            arguments = ("-c", self._conf, *arguments)
        done = subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace")[-2000:]
            raise RuntimeError(f"{program} {' '.join(map(str, arguments))}: {said}\n{self.logs()}")

    def _create_bucket(self) -> None:
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self._port}",
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=COMMAND_TIMEOUT_S, connect_timeout=5),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                try:
                    client.create_bucket(Bucket=BUCKET)
                except (BotoCoreError, ClientError):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
                else:
                    return
        finally:
            client.close()


@contextmanager
def ceph_server(objectstore: Objectstore, more: str = "") -> Iterator[Cluster]:
    """A running cluster with one empty bucket."""
    prepare()
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=KEY, AWS_EC2_METADATA_DISABLED="true")
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder:
        cluster = Cluster(Path(folder), objectstore, more)
        try:
            cluster.create()
            yield cluster
        finally:
            cluster.kill(*DAEMONS)


def prepare() -> None:
    """Ceph's programs, installed where that is possible. Raises RuntimeError that says what to install."""
    prepare_programs(PROGRAMS, INSTALL, who="the tests on Ceph need its daemons")


if __name__ == "__main__":
    prepare()
