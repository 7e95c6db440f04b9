"""What a run measures: tokens per second, model FLOPs utilisation, and the rows of metrics.jsonl."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.estimate import find_gpu, flops_per_token, num_parameters
from trainer.parallel import World, seconds_between
from trainer.storage import Storage

FLUSH_SECONDS = 10  # metrics.jsonl is written whole, as S3 cannot append: not at every step


def mfu(tokens_per_second: float, flops_of_token: float, device: torch.device, num_devices: int) -> float | None:
    """Share of the devices' peak that `tokens_per_second` of all of them together uses; None for an unknown device."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return tokens_per_second * flops_of_token / (gpu.flops * num_devices) if gpu else None


def _peak_memory(device: torch.device) -> float | None:
    """GiB that tensors have filled on this rank's GPU at most; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


class Meter:
    """Tokens per second since the last row."""

    def __init__(self, model: Any, sequence_length: int, num_steps: int, world: World):
        shape = model.config.get_text_config()
        self.flops = flops_per_token(*num_parameters(model), shape.num_hidden_layers, shape.hidden_size, sequence_length)
        self.num_steps, self.world = num_steps, world
        self.seconds_per_step: float | None = None
        self.pause()

    def step(self, tokens: int, ended: Any) -> None:
        """Takes note of a step of `tokens` that ended at that moment of the world's."""
        self.tokens += tokens
        self.steps += 1
        self.latest = ended

    def row(self, step: int, **values: float) -> dict[str, Any]:
        """One line of metrics.jsonl, by the device's clock: the CPU is told of a step's end late, or waits for nothing."""
        elapsed = seconds_between(self.since, self.latest)
        speed = self.tokens / elapsed
        # Smoothed, so that the time left does not jump.
        latest = elapsed / self.steps
        self.seconds_per_step = latest if self.seconds_per_step is None else 0.7 * self.seconds_per_step + 0.3 * latest
        self.tokens, self.steps, self.since = 0, 0, self.latest
        return {
            "step": step,
            "num_steps": self.num_steps,
            **values,
            "workers": self.world.size,
            "tokens_per_second": round(speed, 1),
            "mfu": mfu(speed, self.flops, self.world.device, self.world.size),
            "gpu_memory_gib": _peak_memory(self.world.device),
            "seconds_left": round((self.num_steps - step) * self.seconds_per_step, 1),
        }

    def pause(self) -> None:
        """Starts the clock again after work that is not training."""
        self.tokens, self.steps, self.since = 0, 0, self.world.now()


class Journal:
    """metrics.jsonl: one row a logged step, kept through resumes. Rank 0 alone writes, once `check` has let it, and tells `report`."""

    def __init__(
        self, storage: Storage, step: int, is_main: bool, report: Callable[[dict[str, Any]], None], check: Callable[[], None]
    ):
        self.storage, self.is_main, self.report, self.check = storage, is_main, report, check
        self.rows = [row for row in read_rows(storage) if row["step"] <= step] if step and is_main else []
        self.written = 0.0
        if measured := [row for row in self.rows if "eval_loss" in row]:
            report(measured[0])  # what it was before training, to compare with at the end

    def add(self, row: dict[str, Any]) -> None:
        if not self.is_main:
            return
        # A run that died after its last step measures that step again.
        self.rows = [old for old in self.rows if (old["step"], _kind(old)) != (row["step"], _kind(row))]
        self.rows.append(row)
        self.report(row)
        if time.monotonic() - self.written > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.is_main:
            self.check()
            self.storage.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows).encode())
            self.written = time.monotonic()


def _kind(row: dict[str, Any]) -> str:
    """What a row tells of a step: `loss`, `eval_loss`, `skipped_steps` or `exported_step`."""
    return next(key for key in ("loss", "eval_loss", "skipped_steps", "exported_step") if key in row)


def read_rows(storage: Storage) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, none where there is no such file."""
    try:
        lines = storage.read("metrics.jsonl").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line cut short
            rows.append(json.loads(line))
    return rows
