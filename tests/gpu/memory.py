"""Compares trainer.estimate's memory with what steps fill of this machine's GPU, and prints a table; fails where it is off by more.

    python tests/gpu/memory.py

One process and two steps a case: a model's first case compiles. Time is of the second step.
"""

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[1] / "trainer"),
    str(Path(__file__).parents[1] / "bench"),
]
from speed import make_steps  # noqa: E402
from tiny import QWEN_1P5B  # noqa: E402
from transformers import Qwen2Config  # noqa: E402

from trainer.config import Hardware, TrainerConfig  # noqa: E402
from trainer.estimate import GIB, Choice, Shape, peak_bytes  # noqa: E402
from trainer.optim import build_optimizer  # noqa: E402
from trainer.parallel import Wish, blocks, join_world  # noqa: E402
from trainer.train import make_model, train_step  # noqa: E402

TOLERANCE = 0.04
SMALL = QWEN_1P5B | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
WIDE = QWEN_1P5B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
# Model, sequence length, micro-batch, recomputed blocks.
CASES = [
    (QWEN_1P5B, 4096, 8, 0),
    (QWEN_1P5B, 4096, 8, 14),
    (QWEN_1P5B, 4096, 8, 28),
    (QWEN_1P5B, 4096, 4, 0),
    (QWEN_1P5B, 4096, 2, 0),
    (QWEN_1P5B, 4096, 1, 0),
    (QWEN_1P5B, 16384, 2, 0),
    (SMALL, 4096, 16, 0),
    (WIDE, 4096, 4, 0),
]


def measure(shape: dict[str, Any], length: int, micro_batch: int, recomputed: int, world: Any) -> tuple[float, float, float]:
    """GiB that were filled, GiB that the estimate says, and tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        values = {
            "name": "memory",
            "model": {"path": folder},
            "data": {"train": "-", "sequence_length": length},
            "batch": {"sequences": 2 * micro_batch, "micro_batch": micro_batch},
            "recompute_blocks": recomputed,
        }
        config = TrainerConfig.model_validate(values)
        model, config = make_model(Path(folder), config, Hardware(), world)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    optimizer = build_optimizer(model, config.optim)
    tokens, steps = make_steps("full", 2, config, length)
    torch.cuda.reset_peak_memory_stats()
    seconds = 0.0
    for packs in steps:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        train_step(model, optimizer, tokens, packs, config, world)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    total = torch.cuda.get_device_properties(world.device).total_memory
    expected = peak_bytes(Shape.of(model, blocks(model), 2), Choice(micro_batch, recomputed, "step"), 1, length, total)
    return torch.cuda.max_memory_allocated() / GIB, expected / GIB, 2 * micro_batch * length / seconds


def main() -> None:
    worst = 0.0
    print(
        "| parameters' width, layers | sequence | micro-batch | recomputed | GiB | estimate | off | tokens/s |\n" + "|---" * 8 + "|"
    )
    with join_world(lambda: Wish.NOTHING) as world:
        for shape, length, micro_batch, recomputed in CASES:
            filled, expected, speed = measure(shape, length, micro_batch, recomputed, world)
            gc.collect()
            torch.cuda.empty_cache()
            worst = max(worst, abs(expected / filled - 1))
            print(
                f"| {shape['hidden_size']}, {shape['num_hidden_layers']} | {length} | {micro_batch} | {recomputed} "
                f"| {filled:.2f} | {expected:.2f} | {expected / filled - 1:+.1%} | {speed:,.0f} |",
                flush=True,
            )
    if worst > TOLERANCE:
        raise SystemExit(f"the estimate is off by {worst:.1%}, and {TOLERANCE:.0%} is allowed")


if __name__ == "__main__":
    main()
