"""The oldest Ray that raycheck supports: the first one with Train V2 by default, which has `checkpoint_upload_mode`.

In a virtual environment beside the repository's, which has nothing but that Ray and finds all else in the other one.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = "2.51.0"
FOLDER = Path(__file__).parents[2] / ".venv-oldest-ray"
PYTHON = FOLDER / "bin/python"


def prepare() -> None:
    """The environment, whole or not at all: its stamp is written last."""
    stamp = FOLDER / f"ray-{VERSION}"
    if stamp.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True, timeout=120)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", f"ray=={VERSION}"]
    subprocess.run(install, check=True, timeout=600)
    (site,) = FOLDER.glob("lib/python*/site-packages")
    (site / "all-else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.touch()


if __name__ == "__main__":
    prepare()
