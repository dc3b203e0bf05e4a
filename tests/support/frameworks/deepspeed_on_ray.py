"""Runs Ray's example for DeepSpeed, with raycheck or as it is: `python this-file TRAININGS-AS-JSON`, where DeepSpeed is.

All trainings are in one Ray, one after the other. Its workers are gloo ranks on CPUs.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.frameworks.deepspeed_training import PYTHON

ROOT = Path(__file__).parents[3]


def train_all(*trainings: dict[str, Any], within_s: float = 400.0) -> None:
    """Call the example's `main` with these arguments, in a process with DeepSpeed.

    `goes_back_to` is a step to which the run is rewound first. `example` is the module; by default, that with raycheck.
    `loads` is a folder with a checkpoint of DeepSpeed's own, which the engine loads first.
    """
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


def train_by_gloo(example: str, loads: str | None, config: dict[str, Any]) -> None:
    import deepspeed

    def initialize(**options: Any) -> tuple[Any, ...]:
        engine, *rest = whole(**options)
        if loads is not None:
            engine.load_checkpoint(loads)
        return engine, *rest

    # DeepSpeed would compile its own communication for CPUs, whose shared memory a killed rank leaves behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    whole = deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        importlib.import_module(example).train_func(config)


def main(trainings: list[dict[str, Any]]) -> None:
    import ray

    import raycheck

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
            if (step := training.pop("goes_back_to", None)) is not None:
                raycheck.open_run(f"{training['storage_path']}/bert").rewind(step)
            name = f"tests.examples.{training.pop('example', 'deepspeed_bert_with_raycheck')}"
            example = importlib.import_module(name)
            example.train_func = partial(train_by_gloo, name, training.pop("loads", None))
            example.main(**training)
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
