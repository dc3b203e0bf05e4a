"""Installs programs of Debian that tests drive, where that is possible."""

import os
import shutil
import subprocess
from collections.abc import Iterable

INSTALL_TIMEOUT_S = 600.0


def prepare_programs(programs: Iterable[str], install: str, *, who: str) -> None:
    """Runs `install`, a command of apt-get, when one of these programs is missing.

    Raises RuntimeError, which says what to install, when that cannot be done here. who: needs them, for that message.
    """
    if all(shutil.which(program) for program in programs):
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise RuntimeError(f"{who}; as root on Debian: {install}")
    wait = ("-o", "DPkg::Lock::Timeout=120")  # another installation may be under way
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", *wait, "update"], [*install.split(), *wait]):
        done = subprocess.run(
            command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')[-2000:]}")
