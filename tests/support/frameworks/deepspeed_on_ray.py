"""Runs Ray's example for DeepSpeed with raycheck: `python this-file TRAININGS-AS-JSON`, in the environment with DeepSpeed.

All trainings are in one Ray, one after the other. Its workers are gloo ranks on CPUs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.frameworks.deepspeed_training import PYTHON

ROOT = Path(__file__).parents[3]


def train_all(*trainings: dict[str, Any], within_s: float = 400.0) -> None:
    """Call the example's `main` with these arguments, in a process with DeepSpeed."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, __file__, json.dumps(trainings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


def train_by_gloo(config: dict[str, Any]) -> None:
    import deepspeed

    from tests.examples import deepspeed_bert_with_raycheck as example

    # DeepSpeed would compile its own communication for CPUs, whose shared memory a killed rank leaves behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    example.train_func(config)


def main(trainings: list[dict[str, Any]]) -> None:
    import ray

    from tests.examples import deepspeed_bert_with_raycheck as example

    example.train_func = train_by_gloo
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as short:  # sockets lie below it
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=short,
        )
        for training in trainings:
            example.main(**training)
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
