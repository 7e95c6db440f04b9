"""Measures full fine-tuning of a Qwen2.5-1.5B-shaped model on this machine's GPU and prints a table.

    python tests/bench/speed.py [--steps N] [--profile] [CASE ...] > RESULTS.md

Results as JSON go to speed-N.json in the folder that --out names.

Each case is one process that runs the trainer's own step on random tokens: `full` rows fill a sequence each, `chat`
rows are log-normal with a mean of 600 tokens and packed. The other cases say what each thing is worth. Tokens/s is of
tokens that count (padding does not), the median of the steps after the first ones, by the device's clock; MFU is
trainer.estimate.flops_per_token over the data sheet's peak; start is from the process's start to the end of step 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()
ROOT = Path(__file__).parents[2]
LENGTH = 4096
WARM_UP = 4
BARE = {"attention": "sdpa", "compile": False, "triton": False, "micro_batch": 4}
SEVEN = {"model": "7B", "sequences": 8, "optim": {"moments": "bfloat16"}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "chat": {"rows": "chat"},
    # From the bare step to `full`, one change after the other.
    "bare: sdpa, not compiled, micro-batch 4": BARE,
    "+ FlashAttention 2 by lengths": BARE | {"attention": "auto", "cudnn": False},
    "+ compiled blocks, micro-batch 8": {"cudnn": False, "triton": False},
    "+ cuDNN attention": {"triton": False},
    # One thing left out, or changed.
    "chat, FlashAttention 2 instead of cuDNN": {"rows": "chat", "cudnn": False},
    "chat, sdpa with a mask": {"rows": "chat", "attention": "sdpa", "micro_batch": 4},
    "full, waiting for each step": {"wait": True},
    "full, 32 sequences a step": {"sequences": 32},
    "full, micro-batch 4": {"micro_batch": 4},
    "full, inductor: coordinate descent": {"inductor": {"coordinate_descent_tuning": True}},
    "full, inductor: pointwise kernels autotuned": {"inductor": {"max_autotune_pointwise": True}},
    "full, inductor: no persistent reductions": {"inductor": {"triton.persistent_reductions": False}},
    "full, inductor: multi-kernel": {"inductor": {"triton.multi_kernel": 1}},
    "full, cublasLt": {"blas": "cublaslt"},
    "full, moments in bfloat16": {"optim": {"moments": "bfloat16"}},
    # Products in 8-bit floats, adapters, and a larger model.
    "float8": {"precision": "float8"},
    "float8, small layers too": {"precision": "float8", "least": 16},
    "lora": {"lora": {"r": 16}},
    "7B": SEVEN,
    "7B, float8": SEVEN | {"precision": "float8"},
    "7B, lora": {"model": "7B", "lora": {"r": 16}},
}
PASSED = ("attention", "compile", "optim", "precision", "lora")


def settings(case: dict[str, Any]) -> Any:
    """The trainer's settings for a case, its model's shape written to a folder."""
    from tiny import QWEN_1P5B, QWEN_7B
    from transformers import Qwen2Config

    from trainer.config import TrainerConfig

    folder = Path("/tmp/speed-model")
    shape = QWEN_7B if case.get("model") == "7B" else QWEN_1P5B
    Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    values = {
        "name": "speed",
        "model": {"path": str(folder)},
        "data": {"train": "-", "sequence_length": LENGTH},
        "batch": {"sequences": case.get("sequences", 16), "micro_batch": case.get("micro_batch")},
    }
    return TrainerConfig.model_validate(values | {key: case[key] for key in PASSED if key in case})


def measure(case: dict[str, Any], num_steps: int, profile: bool) -> dict[str, Any]:
    import gc

    import torch
    import torch._inductor.config

    import trainer.attention
    import trainer.float8
    import trainer.loss
    import trainer.train
    from trainer.config import Hardware
    from trainer.estimate import Choice, Shape, flops_per_token, num_parameters, peak_bytes
    from trainer.metrics import mfu
    from trainer.optim import build_optimizer
    from trainer.packing import num_tokens, total_weight
    from trainer.parallel import Wish, blocks, join_world
    from trainer.train import make_model, train_step

    config = settings(case)
    if not case.get("cudnn", True):
        trainer.attention._kernel = lambda *_: trainer.attention.FLASH
    if "least" in case:
        trainer.float8.LEAST = case["least"]
    if not case.get("triton", True):
        trainer.loss.has_triton = lambda: False

    for name, value in case.get("inductor", {}).items():
        setattr(torch._inductor.config, name, value)
    if "blas" in case:
        torch.backends.cuda.preferred_blas_library(case["blas"])

    with join_world(lambda: Wish.NOTHING) as world:
        model, config = make_model(Path(config.model.path), config, Hardware(), world)
        shape = model.config
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        optimizer = build_optimizer(model, config.optim)
        tokens, steps = make_steps(case.get("rows", "full"), num_steps, config)
        gc.collect()
        gc.freeze()
        ends, losses, first = [], [], 0.0
        for number, packs in enumerate(steps, start=1):
            loss, norm = train_step(model, optimizer, tokens, packs, config, world)
            losses.append(loss)
            if case.get("wait"):
                norm.item()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if number == 1:
                torch.cuda.synchronize()
                first = time.time() - STARTED
        if profile:
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profiler:
                train_step(model, optimizer, tokens, steps[-1], config, world)
                torch.cuda.synchronize()
            print_kernels(profiler)
        torch.cuda.synchronize()
        seconds = [a.elapsed_time(b) / 1000 for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
        counted = steps[WARM_UP + 1 :]
        speed = statistics.median(num_tokens(tokens, packs) / s for packs, s in zip(counted, seconds, strict=False))
        flops = flops_per_token(*num_parameters(model), shape.num_hidden_layers, shape.hidden_size, LENGTH)
        supervised = sum(total_weight(tokens, packs) for packs in counted) / sum(num_tokens(tokens, packs) for packs in counted)
        choice = Choice(config.batch.micro_batch or 1, config.recompute_blocks or 0, "step")
        total = torch.cuda.get_device_properties(world.device).total_memory
        estimated = peak_bytes(Shape.of(model, blocks(model), 2, config.optim.moments), choice, 1, LENGTH, total)
        from torch._dynamo.utils import counters

        return {
            "tokens_per_second": speed,
            "supervised_share": supervised,
            "mfu": mfu(speed, flops, world.device, 1),
            "step_seconds": statistics.median(seconds),
            "step_seconds_range": [min(seconds), max(seconds)],
            "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "estimated_gib": estimated / 2**30,
            "micro_batch": config.batch.micro_batch,
            "recomputed_blocks": config.recompute_blocks,
            "start_seconds": first,
            "attention": shape._attn_implementation,
            "loss": [losses[0].item(), losses[-1].item()],
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }


def print_kernels(profiler: Any) -> None:
    """The device's time by kernel, on stderr."""
    kernels = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    kernels = sorted(kernels, key=lambda event: -event.self_device_time_total)[:45]
    for event in kernels:
        print(f"{event.self_device_time_total / 1000:9.2f} ms {event.count:6d} x  {event.key[:90]}", file=sys.stderr)


def make_steps(rows: str, num_steps: int, config: Any, length: int = LENGTH) -> tuple[Any, list[list[Any]]]:
    """Random tokens and the packs of each step."""
    import numpy as np
    from stores import tokens_of

    from trainer.packing import Plan

    random = np.random.default_rng(0)
    count = config.batch.sequences * num_steps
    if rows == "full":
        lengths = np.full(count, length)
    else:
        lengths = np.clip(random.lognormal(np.log(600) - 0.5, 1.0, count * 8), 8, LENGTH).astype(np.int64)
    total = int(lengths.sum())
    # Half of the tokens follow from the one before, so that there is something to learn.
    ids = random.integers(0, 20000, total, dtype=np.int32)
    ids[1::2] = (ids[: total // 2 * 2 : 2] * 7 + 1) % 20000
    tokens = tokens_of(ids, np.ones(total, bool), lengths)
    plan = Plan(tokens, config)
    return tokens, [plan.step_packs(step) for step in range(1, num_steps + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes, on stderr")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: make bench: this machine has no CUDA GPU, which it measures; run it on one", file=sys.stderr)
        raise SystemExit(2)
    if arguments.one:
        print(json.dumps(measure(CASES[arguments.one], arguments.steps, arguments.profile)))
        return
    results = {}
    titles = ("case", "tokens/s", "MFU", "supervised", "GiB", "estimated", "micro-batch", "start s", "graphs", "loss")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in arguments.cases or CASES:
        command = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "trainer"), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, *(["--profile"] if arguments.profile else [])],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        if done.returncode:
            print(f"| {name} | failed |", flush=True)
            continue
        row = results[name] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | {row['supervised_share']:.1%} | "
            f"{row['gpu_memory_gib']:.1f} | {row['estimated_gib']:.1f} | {row['micro_batch']} | {row['start_seconds']:.0f} | "
            f"{row['graphs']} | "
            f"{row['loss'][0]:.3f} -> {row['loss'][1]:.3f} |",
            flush=True,
        )
        (arguments.out / f"speed-{arguments.steps}.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
