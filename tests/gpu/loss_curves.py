"""Trains a Qwen2.5-1.5B shape from the same random weights on the same tokens in several precisions, and prints the loss curves.

    python tests/gpu/loss_curves.py [--steps 300] [--out FOLDER] [VARIANT ...]

Each variant is one process of the trainer's own step: one sequence of 2048 tokens a step, of which half follow from the
token before. Losses are means over the steps since the row above; the last column is the greatest distance of such a
mean from bfloat16's, the first variant, after step 50. All losses go to loss-curves.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer"), str(ROOT / "tests" / "bench")]
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "moments in bfloat16": {"optim": {"moments": "bfloat16", "lr": 2e-4}},
    "float8": {"precision": "float8"},
}
LENGTH, SEQUENCES, EVERY = 2048, 1, 25


def train(variant: str, num_steps: int) -> list[float]:
    """The loss of each step."""
    import torch
    from speed import make_steps
    from tiny import QWEN_1P5B
    from transformers import Qwen2Config

    from trainer.config import Hardware, TrainerConfig
    from trainer.optim import build_optimizer, learning_rate, set_learning_rate
    from trainer.parallel import Wish, join_world
    from trainer.train import make_model, train_step

    folder = Path("/tmp/loss-model")
    Qwen2Config(**QWEN_1P5B, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    values = {
        "name": "curves",
        "model": {"path": str(folder)},
        "data": {"train": "-", "sequence_length": LENGTH},
        "batch": {"sequences": SEQUENCES},
        "optim": {"lr": 2e-4},
        "schedule": {"warmup_steps": 20},
    }
    config = TrainerConfig.model_validate(values | VARIANTS[variant])
    with join_world(lambda: Wish.NOTHING) as world:
        model, config = make_model(folder, config, Hardware(), world)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        optimizer = build_optimizer(model, config.optim)
        tokens, steps = make_steps("full", num_steps, config, LENGTH)
        losses = []
        for step, packs in enumerate(steps, start=1):
            set_learning_rate(optimizer, learning_rate(step, num_steps, config.optim.lr, config.schedule))
            losses.append(train_step(model, optimizer, tokens, packs, config, world)[0])
        return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; all where none is named")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(arguments.one, arguments.steps)))
        return
    curves: dict[str, list[float]] = {}
    for name in arguments.variants or VARIANTS:
        command = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ, check=True)
        curves[name] = json.loads(done.stdout.splitlines()[-1])
        (arguments.out / "loss-curves.json").write_text(json.dumps(curves))
    ends = range(EVERY, arguments.steps + 1, EVERY)
    means = {name: [statistics.mean(losses[end - EVERY : end]) for end in ends] for name, losses in curves.items()}
    plain = next(iter(means.values()))
    print(f"| steps to | {' | '.join(f'{end}' for end in ends)} | furthest |\n{'|---' * (len(ends) + 2)}|")
    for name, row in means.items():
        furthest = max((abs(a / b - 1) for a, b, end in zip(row, plain, ends, strict=True) if end > 50), default=0.0)
        print(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in row)} | {furthest:.2%} |", flush=True)


if __name__ == "__main__":
    main()
