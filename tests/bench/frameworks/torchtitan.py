"""Measures how long a save blocks torchtitan's trainer: `python -m tests.bench.frameworks.torchtitan`.

One process, its Llama of 256 channels with 25 layers (about 90 MB of weights, 268 MB with AdamW's moments), on the CPU, a
local folder, a save after each step. Measured are torchtitan's CheckpointManager, without and with async_mode="async",
and raycheck's. What counts is the time in `save` and in `maybe_wait_for_staging`, each time with the save before
written or committed, as in a training of long steps: the median of five, without the first, which claims memory.
"""

import copy
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import raycheck
from tests.support.frameworks.torchtitan_on_cpu import debug_model, make_assets, make_run_on_cpu
from tests.support.servers.ports import free_port

LAYERS, STEPS = 25, 6


def job_in(folder: Path, tokens: Path, texts: Path) -> Any:
    """Returns the Config of a training, without a checkpoint's."""
    job = debug_model()
    layers = job.model_spec.model.layers
    job.model_spec.model.layers = [copy.deepcopy(layers[0]) for _ in range(LAYERS)]
    job.hf_assets_path, job.dataloader.dataset_path, job.dump_folder = str(tokens), str(texts), str(folder)
    job.training.seq_len, job.training.local_batch_size, job.training.steps = 16, 1, STEPS + 1
    job.training.disable_cuda_graphs = True
    job.parallelism.spmd_backend = "partial_dtensor"
    job.optimizer.implementation = "for-loop"
    return job


def blocked_s(checkpoint: Any, folder: Path, assets: tuple[Path, Path]) -> tuple[float, int]:
    """Returns the median seconds for which a save stops the training, and the bytes of weights and moments."""
    job = job_in(folder, *assets)
    job.checkpoint = checkpoint
    trainer = job.build()
    manager = trainer.checkpointer
    wait_always = type(manager) is raycheck.torchtitan.CheckpointManager  # which has no future to ask
    seconds: list[float] = []
    save, stage = manager.save, manager.maybe_wait_for_staging

    def timed_save(step: int, last_step: bool = False) -> bool:
        if step > 1 and (wait_always or manager.save_future is not None):
            manager._wait_for_saving()
        began = time.monotonic()
        saved = save(step, last_step)
        seconds.append(time.monotonic() - began)
        return saved

    def timed_stage() -> None:
        began = time.monotonic()
        stage()
        if seconds:
            seconds[-1] += time.monotonic() - began

    manager.save, manager.maybe_wait_for_staging = timed_save, timed_stage
    trainer.train()
    trainer.close()
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    return statistics.median(seconds[1:STEPS]), sum(3 * 4 * parameter.numel() for parameter in parameters)


def main() -> None:
    make_run_on_cpu()
    import torch
    from torchtitan.components.checkpointer import CheckpointManager

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port()), TORCHELASTIC_RUN_ID="bench", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assets = make_assets(folder / "assets")
        configs = {
            "raycheck": raycheck.torchtitan.CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2),
            "torchtitan's own": CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2),
            'and async_mode="async"': CheckpointManager.Config(
                enable=True, interval=1, keep_latest_k=2, async_mode="async"
            ),
        }
        found = {
            way: blocked_s(config, folder / str(number), assets) for number, (way, config) in enumerate(configs.items())
        }
    torch.distributed.destroy_process_group()
    unit, size = found["raycheck"]
    print(f"{size / 1e6:.0f} MB of weights and moments")
    for way, (seconds, _) in found.items():
        print(f"{way}: {seconds:.3f} s, {seconds / unit:.1f} times raycheck's")


if __name__ == "__main__":
    main()
