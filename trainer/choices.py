"""What the trainer picks by itself from the GPU and the model, and the lines in which it says what, and why."""

from collections.abc import Callable
from typing import Any

import torch

from trainer.attention import describe_kernels
from trainer.config import Hardware, InputError, TrainerConfig
from trainer.estimate import GIB, GPUS, USABLE, Choice, Machine, Shape, choose, find_gpu, peak_bytes
from trainer.parallel import World, blocks


def decide(
    model: Any, config: TrainerConfig, hardware: Hardware, dtype: torch.dtype, world: World, say: Callable[[str], None]
) -> tuple[TrainerConfig, Choice]:
    """The settings with everything filled in that was left to the trainer, and the choice; rank 0 says what it is.

    `model` is on the meta device still. A collective in effect: every rank must come to the same.
    """
    if world.device.type == "cuda":
        choice, lines = _for_gpus(model, config, hardware, dtype, world)
    else:
        choice, lines = Choice(config.batch.micro_batch or 1, config.recompute_blocks or 0), []
    if world.is_main:
        for line in lines:
            say(line)
    batch = config.batch.model_copy(update={"micro_batch": choice.micro_batch})
    return config.model_copy(update={"batch": batch, "recompute_blocks": choice.recomputed}), choice


def _for_gpus(model: Any, config: TrainerConfig, hardware: Hardware, dtype: torch.dtype, world: World) -> tuple[Choice, list[str]]:
    facts = torch.cuda.get_device_properties(world.device)
    machine = Machine(
        find_gpu(facts.name) or GPUS["NVIDIA A100"],  # only what is faster than what is asked of it
        facts.total_memory,
        -(-world.size // hardware.nodes),
        hardware.nodes,
    )
    shape = Shape.of(model, blocks(model), dtype.itemsize, config.optim.moments)
    length, sequences = config.data.sequence_length, config.batch.sequences
    lines = [f"GPU: {facts.name}, {USABLE * machine.memory_bytes / GIB:.0f} of {machine.memory_bytes / GIB:.0f} GiB to be used"]
    try:
        choice = choose(shape, machine, sequences, length, config.batch.micro_batch, config.recompute_blocks)
    except InputError as error:
        # The estimate knows dense models best, so that it does not have the last word.
        choice = Choice(config.batch.micro_batch or 1, config.recompute_blocks or shape.num_blocks, "block")
        lines.append(f"memory: perhaps too small: {error}")
    needed = peak_bytes(shape, choice, world.size, length, machine.memory_bytes) / GIB
    lines.append(
        f"micro-batch: {choice.micro_batch} of {-(-sequences // world.size)} sequences a step and worker, about {needed:.0f} GiB"
        + (" (batch.micro_batch)" if config.batch.micro_batch else ", the fastest that fits")
    )
    if choice.recomputed:
        why = "(recompute_blocks)" if config.recompute_blocks is not None else "as more activations do not fit"
        lines.append(f"recomputation: {choice.recomputed} of {shape.num_blocks} blocks, {why}")
    else:
        lines.append("recomputation: none, as all activations fit")
    lines.append(f"weights: {_sharding(choice, world.size)}")
    head_dim = shape.query // shape.heads
    kernels = describe_kernels(model.config._attn_implementation, shape.heads, shape.key // head_dim, head_dim, dtype, world.device)
    products = ", large products in 8-bit floats" if config.precision == "float8" else ""
    lines.append(f"kernels: {kernels}; blocks {'compiled' if model.is_compiled else 'not compiled'}{products}")
    return choice, lines


def _sharding(choice: Choice, size: int) -> str:
    if size == 1:
        return "whole, as there is one GPU"
    kept = {
        "step": "gathered once a step, as they and unreduced gradients fit",
        "pass": "gathered for each micro-batch, as unreduced gradients do not fit",
        "block": "gathered block by block, as more does not fit",
    }
    return f"sharded over {size} GPUs, {kept[choice.gathered]}"
