"""Measures TRL's SFTTrainer at what speed.py measures: the same model shape, rows and step; one case a process, which speed.py starts.

    python tests/bench/trl_speed.py CASE STEPS

Prints JSON. TRL takes float32 weights and computes in bfloat16 by autocast, as it does when it is given a model's path.
"""

import json
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "trainer")]
from tiny import QWEN_1P5B, build_tokenizer  # noqa: E402

LENGTH, SEQUENCES, WARM_UP = 4096, 16, 3
NO_RECOMPUTATION = {"gradient_checkpointing": False}
CASES: dict[str, dict[str, Any]] = {
    "TRL, its defaults": {},
    "TRL, no gradient checkpointing": NO_RECOMPUTATION,
    "TRL, no gradient checkpointing, Liger": NO_RECOMPUTATION | {"use_liger_kernel": True},
    "TRL, its defaults, chat": {"rows": "chat", "micro_batch": 16},
} | {
    f"TRL, packed, Liger, {attention}, micro-batch {micro_batch}": NO_RECOMPUTATION
    | {"rows": "chat", "packing": True, "use_liger_kernel": True, "attention": attention, "micro_batch": micro_batch}
    for attention in ("sdpa", "flex_attention")
    for micro_batch in (1, 2, 4, 8)
}


def rows(kind: str, count: int) -> list[list[int]]:
    """Token ids of as many rows as fill `count` sequences, of the lengths that speed.py gives the trainer."""
    import numpy as np

    random = np.random.default_rng(0)
    if kind == "full":
        lengths = np.full(count, LENGTH)
    else:
        lengths = np.clip(random.lognormal(np.log(600) - 0.5, 1.0, count * 8), 8, LENGTH).astype(np.int64)
    return [random.integers(0, 20000, length).tolist() for length in lengths]


def measure(case: dict[str, Any], num_steps: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    from trainer.estimate import flops_per_token
    from trainer.metrics import mfu

    case = dict(case)
    kind, micro_batch = case.pop("rows", "full"), case.pop("micro_batch", 8)
    config = Qwen2Config(**QWEN_1P5B)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation=case.pop("attention", "sdpa"))
    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    ends: list[Any] = []
    counts: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            # Labels of padding are -100; a packed row's first label is never predicted, and counts as a token all the same.
            counts.append((inputs["labels"] != -100).sum())
            return super().training_step(model, inputs, *arguments)

    accumulate = SEQUENCES // micro_batch
    packed = case.get("packing", False)
    needed = num_steps * SEQUENCES if kind == "full" or packed else num_steps * SEQUENCES // 8
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_length=LENGTH,
            max_steps=num_steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulate,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            **case,
        )
        data = Dataset.from_dict({"input_ids": rows(kind, needed)})
        trainer = Counting(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
        trainer.train()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    per_step = [int(sum(counts[i : i + accumulate])) for i in range(0, len(counts), accumulate)][WARM_UP:]
    speed = statistics.median(tokens / s for tokens, s in zip(per_step, seconds, strict=False))
    count = sum(parameter.numel() for parameter in model.parameters())
    flops = flops_per_token(count, count, config.num_hidden_layers, config.hidden_size, LENGTH)
    return {
        "tokens_per_second": speed,
        "mfu": mfu(speed, flops, torch.device("cuda"), 1),
        "step_seconds": statistics.median(seconds),
        "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "steps": len(seconds),
        "versions": {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")},
    }


if __name__ == "__main__":
    print(json.dumps(measure(CASES[sys.argv[1]], int(sys.argv[2]))))
