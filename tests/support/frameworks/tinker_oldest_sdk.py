"""Installs the oldest SDK that the Tinker server knows, and trains with it: `python this-file URL BASE-MODEL`.

It goes into a virtual environment beside the repository's, and finds all else in that one. The script prints as JSON
what it saw.
"""

import json
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

VERSION = "0.24.1"
FOLDER = Path(__file__).parents[3] / ".venv-tinker-oldest"
PYTHON = FOLDER / "bin/python"


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    prepare_venv(FOLDER, f"tinker-{VERSION}", "--no-deps", f"tinker=={VERSION}", finds_ours=True)


def main(url: str, base: str) -> None:
    import tinker
    from tinker import types

    def datum(length: int, offset: int) -> Any:
        tokens = [(offset + place) % 64 for place in range(length)]
        targets = types.TensorData(data=[(token + 1) % 64 for token in tokens], dtype="int64", shape=[length])
        return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets})

    def train(model: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            passed = model.forward_backward([datum(6, step), datum(9, 2 * step)], "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(passed.result(60).metrics["loss:sum"])
            stepped.result(60)
        return losses

    client = tinker.ServiceClient(base_url=url, api_key="tml-for-tests-only")
    model = client.create_lora_training_client(base_model=base, rank=4, seed=3)
    losses = train(model, range(2))
    path = model.save_state("two").result(60).path
    losses += train(model, range(2, 4))
    resumed = client.create_training_client_from_state_with_optimizer(path)
    again = train(resumed, range(2, 4))
    sampler_path = model.save_weights_for_sampler("four").result(60).path
    sampler = client.create_sampling_client(model_path=sampler_path)
    prompt = types.ModelInput.from_ints([5, 6, 7])
    wanted = types.SamplingParams(max_tokens=4, seed=1, temperature=0.0, stop=[])
    sampled = sampler.sample(prompt, num_samples=1, sampling_params=wanted).result(60).sequences[0]
    now = model.save_weights_and_get_sampling_client()
    again_sampled = now.sample(prompt, num_samples=1, sampling_params=wanted).result(60).sequences[0]
    rest = client.create_rest_client()
    archive = rest.get_checkpoint_archive_url_from_tinker_path(sampler_path).result(60)
    with urllib.request.urlopen(archive.url, timeout=60) as answer, tarfile.open(fileobj=answer, mode="r|") as tar:
        archived = sorted(member.name for member in tar)
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    seen = {
        "archived": archived,
        "version": tinker.__version__,
        "losses": losses,
        "again": again,
        "forward": model.forward([datum(4, 1)], "cross_entropy").result(60).metrics["loss:sum"],
        "sampled": [list(sampled.tokens), list(again_sampled.tokens)],
        "listed": [item.checkpoint_id for item in rest.list_checkpoints(model.model_id).result(60).checkpoints],
        "rank": client.create_rest_client().get_training_run(model.model_id).result(60).lora_rank,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        prepare()
    else:
        main(*sys.argv[1:])
