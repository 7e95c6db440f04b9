"""What Ray costs a step: the same run on this machine, started by Ray Train and by torchrun.

    python tests/bench/ray_cost.py [--rounds N] [--steps N]

Prints a Markdown table: a round is one run of each, on the same rows, by the same command but for the launcher. A ratio is
that of one step's time under Ray to the same step's under torchrun. On CPUs a model of 6 million parameters is trained by
one worker with half of the cores, and the launcher that goes first changes. On two GPUs, and 80 GB of memory under TMPDIR,
a Qwen2.5-1.5B shape is trained by both at once, each with a GPU and half of the cores, and they change places.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer"), str(ROOT / "tests" / "gpu")]
WARM_UP = 3  # steps of a run that do not count
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def settings(folder: Path, num_steps: int, gpus: int) -> Path:
    """A settings file in `folder`, and the model and rows that it names."""
    import tiny
    from transformers import AutoModelForCausalLM, Qwen2Config

    if gpus:
        from train_1p5b import make_model, write_rows  # pyright: ignore[reportMissingImports]

        make_model(folder / "model")
        write_rows(folder / "train.jsonl", [4200] * 16 * num_steps)
    else:
        AutoModelForCausalLM.from_config(Qwen2Config(**tiny.SHAPE | SHAPE)).save_pretrained(folder / "model")
        tiny.build_tokenizer().save_pretrained(folder / "model")
        tiny.write_rows(folder / "train.jsonl", 400)
    data = {"train": str(folder / "train.jsonl"), "eval": None, "sequence_length": 4096 if gpus else 256, "long_rows": "truncate"}
    batch = {"sequences": 16} if gpus else {"sequences": 4, "micro_batch": 2}
    changes = {"duration": {"steps": num_steps}, "checkpoint": {"every_steps": 10_000}, "data": data, "batch": batch}
    file = folder / "settings.json"
    file.write_text(json.dumps(tiny.settings(folder, **changes)))
    return file


def run(launcher: str, file: Path, place: int | None) -> list[float]:
    """Tokens/s of each step, on GPU number `place` and its half of the cores, or on half of the cores where that is None."""
    runs = file.parent / launcher
    train = ["-m", "trainer", "train", "--config", str(file), "--set", f"storage.uri={runs}"]
    command = {
        "ray": [sys.executable, *train, "--workers", "1"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", *train],
    }[launcher]
    half = max(1, (os.cpu_count() or 1) // 2)
    changes = {"OMP_NUM_THREADS": str(half)}
    if place is not None:
        changes["CUDA_VISIBLE_DEVICES"] = str(place)
        cores = f"{place * half}-{place * half + half - 1}"
        command = ["taskset", "--cpu-list", cores, *command]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | changes)
    [metrics] = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    shutil.rmtree(runs)
    return [row["tokens_per_second"] for row in rows if "loss" in row][WARM_UP:]


def both(file: Path, number: int, gpus: int) -> dict[str, list[float]]:
    """Tokens/s of each step by launcher, in round `number`."""
    order = ["ray", "torchrun"] if number % 2 else ["torchrun", "ray"]
    with ThreadPoolExecutor(2 if gpus else 1) as pool:
        waiting = {launcher: pool.submit(run, launcher, file, place if gpus else None) for place, launcher in enumerate(order)}
        return {launcher: future.result() for launcher, future in waiting.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 1:
        parser.error("on GPUs it needs two; CUDA_VISIBLE_DEVICES= measures on the CPUs")
    ratios: list[float] = []
    print("| round | Ray tokens/s | torchrun tokens/s | Ray's time / torchrun's | load |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = settings(Path(folder), arguments.steps, gpus)
        for number in range(1, arguments.rounds + 1):
            speeds = both(file, number, gpus)
            found = [theirs / ours for ours, theirs in zip(speeds["ray"], speeds["torchrun"], strict=True)]
            ratios += found
            ray, torchrun = (statistics.median(speeds[launcher]) for launcher in ("ray", "torchrun"))
            print(
                f"| {number} | {ray:,.0f} | {torchrun:,.0f} | {statistics.median(found):.3f} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"\n{len(ratios)} pairs of steps: {middle:.3f}, the middle half from {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
