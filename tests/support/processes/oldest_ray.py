"""Installs the oldest Ray that raycheck supports: the first one with Train V2 by default, which has `checkpoint_upload_mode`.

It goes into a virtual environment beside the repository's, which has nothing but that Ray and finds all else in the other
one.
"""

from pathlib import Path

from tests.support.processes.virtual_environments import prepare_venv

VERSION = "2.51.0"
FOLDER = Path(__file__).parents[3] / ".venv-oldest-ray"
PYTHON = FOLDER / "bin/python"


def prepare() -> None:
    prepare_venv(FOLDER, f"ray-{VERSION}", "--no-deps", f"ray=={VERSION}", finds_ours=True)


if __name__ == "__main__":
    prepare()
