"""What Ray costs a step: the same run on this machine's CPUs, started by Ray Train and by torchrun in turn.

    python tests/bench/ray_cost.py [--rounds N] [--steps N] [--workers N]

Prints a Markdown table: a round is one run of each, on the same rows, by the same command but for the launcher, and the
one that goes first changes. A ratio is that of one step's time under Ray to the same step's under torchrun.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]
WARM_UP = 2  # steps of a run that do not count
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def settings(folder: Path, num_steps: int, workers: int) -> Path:
    """A settings file in `folder`, with a model of 6 million parameters, whose step takes some tenths of a second."""
    import tiny
    from transformers import AutoModelForCausalLM, Qwen2Config

    model = AutoModelForCausalLM.from_config(Qwen2Config(**tiny.SHAPE | SHAPE))
    model.save_pretrained(folder / "model")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    tiny.write_rows(folder / "train.jsonl", 400)
    data = {"train": str(folder / "train.jsonl"), "eval": None, "sequence_length": 256}
    batch = {"sequences": 4 * workers, "micro_batch": 2}
    changes = {"duration": {"steps": num_steps}, "checkpoint": {"every_steps": 10_000}, "data": data, "batch": batch}
    file = folder / "settings.json"
    file.write_text(json.dumps(tiny.settings(folder, **changes)))
    return file


def run(launcher: str, file: Path, number: int, workers: int) -> list[float]:
    """Tokens/s of each step."""
    runs = file.parent / f"{launcher}-{number}"
    train = ["-m", "trainer", "train", "--config", str(file), "--set", f"storage.uri={runs}"]
    command = {
        "ray": [sys.executable, *train, "--workers", str(workers)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), *train],
    }[launcher]
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": threads})
    [metrics] = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["tokens_per_second"] for row in rows if "loss" in row][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    ratios: list[float] = []
    print("| round | Ray tokens/s | torchrun tokens/s | Ray's time / torchrun's | load |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = settings(Path(folder), arguments.steps, arguments.workers)
        for number in range(1, arguments.rounds + 1):
            order = ["ray", "torchrun"] if number % 2 else ["torchrun", "ray"]
            speeds = {launcher: run(launcher, file, number, arguments.workers) for launcher in order}
            found = [theirs / ours for ours, theirs in zip(speeds["ray"], speeds["torchrun"], strict=True)]
            ratios += found
            ray, torchrun = (statistics.median(speeds[launcher]) for launcher in ("ray", "torchrun"))
            print(
                f"| {number} | {ray:,.0f} | {torchrun:,.0f} | {statistics.median(found):.3f} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"\n{len(ratios)} pairs of steps, {arguments.workers} worker(s): {middle:.3f}, the middle half from {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
