"""A driver with a Ray of its own: `python -m tests.support.processes.interrupted_run FOLDER STORAGE CONFIG`.

Its one rank commits step 4, is killed after step 7, and goes on until FOLDER/over is there. FOLDER/nodes.json gets the
addresses at which the nodes export metrics. CONFIG: JSON with more for ray_jobs.py. Beside the one Ray of the other
tests, so in a process of its own.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import ray
import ray.cloudpickle
import ray.train
import ray.train.torch

import raycheck
import tests.support.processes.ray_jobs
from raycheck.bucket.store.address import join_uri

RUN = "run"


def main() -> None:
    folder, storage = Path(sys.argv[1]), sys.argv[2]
    config = {
        "mode": "plain",
        "epochs": 1000,
        "every": 4,
        "pause_s": 0.6,
        "kill": (0, 7),
        "committed": 4,
        "until": str(folder / "over"),
        "folder": str(folder),
        "uri": join_uri(storage, RUN),
        **json.loads(sys.argv[3]),
    }
    trainer = ray.train.torch.TorchTrainer(
        tests.support.processes.ray_jobs.train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name=RUN, storage_path=storage),
    )
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as short:  # sockets lie below it
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,  # the agent that exports metrics runs all the same
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=short,
        )
        ray.cloudpickle.register_pickle_by_value(tests.support.processes.ray_jobs)
        nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
        (folder / "nodes.json").write_text(json.dumps(nodes))
        raycheck.fit(trainer)
        ray.shutdown()


if __name__ == "__main__":
    main()
