"""Virtual environments that tests need beside the repository's, made when they are not there."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def prepare_venv(folder: Path, stamp: str, *install: str, finds_ours: bool = False) -> None:
    """`folder`, with what pip is told to install, whole or not at all: `stamp`, a file, is written last. finds_ours:
    what it has not itself it finds in the environment of this process."""
    if (folder / stamp).exists():
        return
    if folder.is_symlink():  # `venv --clear` would empty the folder behind it, which is another checkout's
        folder.unlink()
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=120)
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", *install]
    subprocess.run(command, check=True, timeout=600)
    if finds_ours:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "all-else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / stamp).touch()
