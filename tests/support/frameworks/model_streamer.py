"""Installs Run:ai's model streamer, and loads files with it: `python this-file URI...` prints each tensor's digest.

vLLM loads models from `s3://` with it. It goes into a virtual environment beside the repository's, and finds torch and
all else in that one.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "0.17.0"
PACKAGES = (f"runai-model-streamer=={VERSION}", "runai-model-streamer-s3==0.17.1", "humanize")
FOLDER = Path(__file__).parents[3] / ".venv-streamer"
WITHIN_S = 120.0


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    prepare_venv(FOLDER, f"streamer-{VERSION}", "--no-deps", *PACKAGES, finds_ours=True)


def digest_of(tensor: Any) -> str:
    import torch

    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data).hexdigest()


def streamed(uris: Sequence[str], endpoint: str) -> dict[str, str]:
    """Return the digest of each tensor that the streamer loads from these files, by name."""
    settings = {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "RUNAI_STREAMER_S3_ENDPOINT": endpoint,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    done = subprocess.run(
        [FOLDER / "bin/python", __file__, *uris],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def main() -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(sys.argv[1:])
        print(json.dumps({name: digest_of(tensor) for name, tensor in streamer.get_tensors()}))


if __name__ == "__main__" and len(sys.argv) > 1:
    main()
elif __name__ == "__main__":
    prepare()
