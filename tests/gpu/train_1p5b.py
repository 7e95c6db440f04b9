"""Trains a Qwen2.5-1.5B-shaped model with random weights for 20 steps at sequence 4096 on this machine's GPUs.

    python tests/gpu/train_1p5b.py [FOLDER [CASE ...]]        # one process; with GPUS=2 in the environment, torchrun starts two

Goes through the command line like any run, without Ray where Ray is not installed, and prints from its metrics.jsonl:
tokens/s, MFU (trainer.estimate.flops_per_token over the data sheet's peak), memory and the loss of the first and last
steps. Two cases: rows that fill a sequence each, and packed rows of chat length (log-normal, mean 600 tokens).
"""

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]
from tiny import QWEN_1P5B, WORDS, build_tokenizer  # noqa: E402

NUM_STEPS = 20
WARM_UP = 5  # steps left out of the medians


def make_model(folder: Path) -> None:
    config = Qwen2Config(**QWEN_1P5B, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def write_rows(path: Path, words: list[int]) -> None:
    choose = random.Random(0)
    with path.open("w") as file:
        for count in words:
            text = " ".join(choose.choices(WORDS, k=count))
            turns = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")


def train(name: str, rows: Path, folder: Path, gpus: int) -> None:
    settings = {
        "name": name,
        "storage": {"uri": str(folder / f"runs-{gpus}")},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(rows), "sequence_length": 4096, "long_rows": "truncate"},
        "duration": {"steps": NUM_STEPS},
        "batch": {"sequences": 16},
        "optim": {"lr": 1e-4},
        "schedule": {"name": "constant", "warmup_steps": 3},
    }
    config = folder / f"{name}.json"
    config.write_text(json.dumps(settings))
    launcher = [sys.executable] if gpus == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
    subprocess.run(
        [*launcher, "-m", "trainer", "train", "--config", str(config)], check=True, env=os.environ | {"PYTHONPATH": _path()}
    )
    run = max((folder / f"runs-{gpus}").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "loss" in row]
    warm = steps[WARM_UP:]
    print(
        f"| {name} | {torch.cuda.get_device_name()} x {gpus} | torch {torch.__version__} | "
        f"{statistics.median(row['tokens_per_second'] for row in warm):,.0f} tokens/s | "
        f"{statistics.median(row['mfu'] for row in warm):.1%} MFU | {max(row['gpu_memory_gib'] for row in steps):.0f} GiB | "
        f"loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} |",
        flush=True,
    )
    assert steps[-1]["loss"] < steps[0]["loss"]


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this check needs a CUDA GPU with 80 GB or more")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/train-1p5b")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_model(folder / "model")
    choose = random.Random(1)
    write_rows(folder / "full.jsonl", [4200] * 160)
    write_rows(folder / "chat.jsonl", [min(4000, max(4, int(choose.lognormvariate(5.4, 1.0)))) for _ in range(4000)])
    for name in sys.argv[2:] or ("full", "chat"):
        train(name, folder / f"{name}.jsonl", folder, int(os.environ.get("GPUS", "1")))


if __name__ == "__main__":
    main()
