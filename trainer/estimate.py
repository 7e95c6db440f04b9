"""What a step needs of a GPU's memory and how long it takes, by arithmetic, and the choices that follow from it.

It owns the data sheets' figures, the model of memory and time, and `choose`. The trainer asks it before it builds a model,
and `ray-finetune plan` before anyone pays for a GPU, so it needs none, and no torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.config import InputError

GIB = 2**30
USABLE = 0.93  # of a GPU's memory: the rest is the CUDA context, libraries' workspaces and what fragmentation loses
PRODUCTS = 0.74  # of a GPU's peak that matrix products reach, measured on an H200
FLOAT8 = 0.56, 9  # of a product's time that it takes in 8-bit floats, and bytes that rounding costs a number; fitted on two models
SMALL = 700  # tokens of a micro-batch at which kernels reach half of their speed
NETWORK_SHARE = 0.85  # of a network's rate that FSDP's transfers reach, fitted on one measurement: tests/trainer/test_estimate.py
SOCKET_BYTES = 4 * 5e9 / 8  # bytes/s without EFA: EC2 gives one TCP flow 5 Gbit/s, and NCCL opens one for each of some 4 channels

# How long gathered weights stay: through a `step`, with gradients unreduced until its end; from a forward `pass` to its
# backward one; or for one `block` at a time.
Gathered = Literal["step", "pass", "block"]


@dataclass(frozen=True)
class Gpu:
    """`flops`: dense bf16 peak in FLOP/s without sparsity; `memory` and `link`: bytes/s of its memory, and to a GPU of the same
    node in one direction; by NVIDIA's data sheets. `efficiency`: the share of `flops` that training alone on it makes use of.
    `float8`: whether it multiplies 8-bit floats, at twice that peak."""

    flops: float
    memory: float
    link: float
    efficiency: float = 0.5
    float8: bool = True


PCIE = 32e9 / 2  # PCIe 4.0 x16, through the host's memory where GPUs cannot reach each other
# By the start of the device's name. Efficiency is measured on the H200 (benchmarks/), whose chip the H100 has; the others' is assumed.
GPUS = {
    "NVIDIA H200": Gpu(989e12, 4.8e12, 450e9, 0.62),
    "NVIDIA H100": Gpu(989e12, 3.35e12, 450e9, 0.6),
    "NVIDIA B200": Gpu(2250e12, 8e12, 900e9),
    "NVIDIA A100": Gpu(312e12, 1.555e12, 300e9, float8=False),
    "NVIDIA L40S": Gpu(362e12, 864e9, PCIE),
    "NVIDIA L4": Gpu(121e12, 300e9, PCIE),
    "NVIDIA A10G": Gpu(70e12, 600e9, PCIE, float8=False),
}


def find_gpu(name: str) -> Gpu | None:
    """The data sheet of a device of that name; None for an unknown one."""
    return next((gpu for start, gpu in GPUS.items() if name == start or name.startswith(start + " ")), None)


def without_float8(name: str) -> str:
    """Why a run with precision: float8 cannot be on a device of that name."""
    return f"precision: float8: {name} does not multiply 8-bit floats, as Ada, Hopper and later GPUs do; write bfloat16"


def num_parameters(model: Any) -> tuple[int, int]:
    """How many parameters a torch model has, and how many of them are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


def flops_per_token(num_parameters: int, num_trained: int, num_layers: int, hidden_size: int, sequence_length: int) -> float:
    """Model FLOPs of one trained token: 4N + 2T + 12·L·d·S, of which 2N + 4·L·d·S forward.

    PaLM's 6N + 12·L·d·S (Chowdhery et al. 2022, appendix B) where all N parameters are trained, as T is N: 6N for the
    matrix products forward and backward, 12·L·d·S for attention over S tokens, causality not deducted. A weight that is
    frozen has no product for its own gradient. Recomputation does not count. N includes the embedding.
    """
    return 4 * num_parameters + 2 * num_trained + 12 * num_layers * hidden_size * sequence_length


@dataclass(frozen=True)
class Machine:
    """`nodes` of `gpus` each, every GPU with `memory_bytes` of memory; `network` in bytes/s of one node."""

    gpu: Gpu
    memory_bytes: float
    gpus: int = 1
    nodes: int = 1
    network: float = 12.5e9

    @property
    def size(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Shape:
    """A dense transformer: parameters in all, trained ones, in its largest block and in none; its widths; bytes of a computed
    number, of a frozen one as it is kept, and of a moment."""

    parameters: int
    trained: int
    block: int
    outside: int
    num_blocks: int
    hidden: int
    ffn: int
    query: int  # heads x their width
    key: int
    heads: int
    vocabulary: int
    width: int = 2
    frozen_width: int = 4
    moment_width: int = 4
    adapted: int = 0  # numbers that a block's adapters keep of each token
    adapting: int = 0  # and that they read and write of it, forward
    float8: int = 0  # of a block's weights, those that are multiplied in 8-bit floats
    rounded: int = 0  # and their rows and columns
    reduced: int = 4  # bytes of a gradient's number on its way to others

    @classmethod
    def of(cls, model: Any, blocks: list[Any], width: int, moments: str = "float32") -> "Shape":
        """Of a transformers model, on the meta device or any other."""
        config = model.config.get_text_config()
        count, trained = num_parameters(model)
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        adapters = [module for module in model.modules() if hasattr(module, "lora_A")]
        adapted = sum(module.lora_A.shape[0] + (module.in_features if module.dropout else 0) for module in adapters)
        adapting = sum(module.in_features + 2 * module.out_features for module in adapters)
        float8 = [module.weight.shape for module in model.modules() if type(module).__name__ == "Float8Linear"]
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(
            parameters=count,
            trained=trained,
            block=max(sizes, default=count),
            outside=count - sum(sizes),
            num_blocks=len(blocks),
            hidden=config.hidden_size,
            ffn=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            query=config.num_attention_heads * head_dim,
            key=kv_heads * head_dim,
            heads=config.num_attention_heads,
            vocabulary=config.vocab_size,
            width=width,
            frozen_width=min((parameter.element_size() for parameter in frozen), default=4),
            moment_width=2 if moments == "bfloat16" else 4,
            adapted=adapted // max(1, len(blocks)),
            adapting=adapting // max(1, len(blocks)),
            float8=sum(math.prod(sides) for sides in float8) // max(1, len(blocks)),
            rounded=sum(map(sum, float8)) // max(1, len(blocks)),
        )


@dataclass(frozen=True)
class Choice:
    """How a step is run: sequences at once, blocks that make their activations again, and how long weights stay gathered."""

    micro_batch: int
    recomputed: int = 0
    gathered: Gathered = "pass"


# ---- memory ----


def state_bytes(shape: Shape, choice: Choice, size: int) -> float:
    """Bytes of parameters, and of the trained ones' moments and float32 gradients, sharded over `size`; and of what is gathered
    at the fullest."""
    whole, width, trained, frozen = shape.parameters, shape.width, shape.trained, shape.parameters - shape.trained
    kept = (8 + 2 * shape.moment_width) * trained + shape.frozen_width * frozen
    if size == 1:
        copied = (trained if width < 4 else 0) + (frozen if width < shape.frozen_width else 0)
        return kept + width * copied
    largest = min(max(shape.block, shape.outside), trained)
    reducing = (width + 4 + 4 / size) * largest  # a group's gradients, and in float32 on their way
    gathered = {
        "step": width * whole + 4 * trained,
        "pass": width * whole + reducing,
        "block": width * (shape.outside + 2 * shape.block) + reducing,
    }
    return kept / size + gathered[choice.gathered] + (reducing if choice.gathered == "step" else 0)


def activation_bytes(shape: Shape, choice: Choice, sequence_length: int, memory_bytes: float) -> float:
    """Bytes that compiled blocks keep for the backward pass, and the head's at its fullest."""
    tokens = choice.micro_batch * sequence_length
    numbers = 4 * shape.hidden + 2 * shape.query + 2 * shape.key + 3 * shape.ffn + shape.adapted
    kept = shape.width * numbers + 4 * (shape.heads + 2)
    blocks = (shape.num_blocks - choice.recomputed) * kept + choice.recomputed * shape.width * shape.hidden
    chunk = min(tokens, head_chunk(shape.vocabulary, memory_bytes))
    weights = shape.vocabulary * shape.hidden
    gradient = 4 * weights if shape.trained >= weights else 0  # else the head is frozen
    head = shape.width * shape.vocabulary * chunk + gradient + 5 * shape.width * shape.hidden * tokens
    # Once the head is done, a block that is made again takes the head's place.
    return tokens * blocks + max(head, tokens * kept if choice.recomputed else 0)


HEAD_SHARE = 0.01  # of a GPU's memory that a chunk of logits fills
HEAD_MULTIPLE = 64  # the head's chunks are multiples of it, for the matrix kernels


def head_chunk(vocabulary: int, memory_bytes: float) -> int:
    """Tokens whose logits exist at once, at most: a power of two."""
    return max(HEAD_MULTIPLE, 1 << int(HEAD_SHARE * memory_bytes / (2 * vocabulary)).bit_length() - 1)


def peak_bytes(shape: Shape, choice: Choice, size: int, sequence_length: int, memory_bytes: float) -> float:
    """Bytes that a step fills of one of `size` GPUs, at most."""
    return state_bytes(shape, choice, size) + activation_bytes(shape, choice, sequence_length, memory_bytes)


# ---- time ----


@dataclass(frozen=True)
class Times:
    """Seconds of a step: computing, waiting for transfers beyond that, and the optimizer."""

    compute: float
    transfers: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.transfers + self.optimizer


def step_times(shape: Shape, choice: Choice, machine: Machine, sequences: int, sequence_length: int) -> Times:
    """Of one optimizer step over `sequences` packed sequences on all GPUs together."""
    gpu, size = machine.gpu, machine.size
    share = -(-sequences // size)
    passes = -(-share // choice.micro_batch)
    tokens = choice.micro_batch * sequence_length
    speed = gpu.flops * gpu.efficiency * tokens / (tokens + SMALL)
    whole, trained = shape.parameters, shape.trained
    of_all, of_trained = (flops_per_token(whole, n, shape.num_blocks, shape.hidden, sequence_length) for n in (whole, trained))
    reading = shape.width * whole / gpu.memory  # the weights, for each of three products
    forward = max(tokens * of_all / 3 / speed, reading)
    backward = max(tokens * (of_trained - of_all / 3) / speed, reading * (1 + trained / whole))
    beside = tokens * shape.num_blocks * _beside(shape, gpu, tokens)
    forward, backward = forward + beside, backward + 2 * beside
    backward += forward * choice.recomputed * shape.block / whole
    gather = transfer_seconds(shape.width * whole, machine)
    reduce = transfer_seconds(shape.reduced * trained, machine)
    # What is sent while something is computed costs only what it takes longer.
    first, last = max(0.0, gather - forward), max(0.0, reduce - backward)
    waiting = {
        "step": first + last,
        "pass": passes * (first + last),
        "block": passes * (first + max(0.0, gather + reduce - backward)),
    }
    read_and_written = 32 if shape.moment_width == 4 else 56  # bytes of a parameter; narrow moments are widened for the step
    optimizer = read_and_written * trained / size / gpu.memory
    return Times(passes * (forward + backward), waiting[choice.gathered] if size > 1 else 0.0, optimizer)


def _beside(shape: Shape, gpu: Gpu, tokens: int) -> float:
    """Seconds that adapters cost a token and block, forward, less what products in 8-bit floats spare it; backward it is twice that."""
    share, rounding = FLOAT8
    spared = (1 - share) * 2 * shape.float8 / (PRODUCTS * gpu.flops) * (tokens + SMALL) / tokens
    return (shape.width * shape.adapting + rounding / 3 * shape.rounded) / gpu.memory - spared


def transfer_seconds(num_bytes: float, machine: Machine) -> float:
    """To gather `num_bytes` from all shards, or to reduce that much into them, in a ring through all GPUs."""
    passing = num_bytes * (machine.size - 1) / machine.size  # through each GPU, and through the network of each node
    network = passing / (NETWORK_SHARE * machine.network) if machine.nodes > 1 else 0.0
    inside = passing / (NETWORK_SHARE * machine.gpu.link) if machine.gpus > 1 else 0.0
    return max(network, inside)


# ---- the choice ----


def choose(
    shape: Shape,
    machine: Machine,
    sequences: int,
    sequence_length: int,
    micro_batch: int | None = None,
    recomputed: int | None = None,
) -> Choice:
    """The fastest choice that fits the memory, with what is given left as it is; InputError where none does."""
    room = USABLE * machine.memory_bytes
    choices = _choices(shape, machine, sequences, sequence_length, micro_batch, recomputed)
    needed = {choice: peak_bytes(shape, choice, machine.size, sequence_length, machine.memory_bytes) for choice in choices}
    fitting = [choice for choice in choices if needed[choice] <= room]
    if not fitting:
        raise InputError(
            f"a sequence of {sequence_length} tokens needs {min(needed.values()) / GIB:.0f} GiB of each GPU, "
            f"and {room / GIB:.0f} GiB can be used; {_remedy(shape, machine, choices, sequence_length)}"
        )
    return min(fitting, key=lambda choice: step_times(shape, choice, machine, sequences, sequence_length).step)


def _choices(
    shape: Shape, machine: Machine, sequences: int, sequence_length: int, micro_batch: int | None, recomputed: int | None
) -> list[Choice]:
    """All that are worth a thought, whether they fit or not."""
    share = -(-sequences // machine.size)
    choices = []
    for count in [micro_batch] if micro_batch else [n for n in range(1, share + 1) if share % n == 0]:
        for gathered in ("step", "pass", "block") if machine.size > 1 else ("step",):
            choice = Choice(count, 0, gathered)
            choices.append(
                _least_recomputed(shape, choice, machine, sequence_length)
                if recomputed is None
                else replace(choice, recomputed=min(recomputed, shape.num_blocks))
            )
    return choices


def _remedy(shape: Shape, machine: Machine, choices: list[Choice], sequence_length: int) -> str:
    """What would make a model fit that does not: the smallest change to the run that would, or another machine."""
    changed = {"optim.moments: bfloat16": replace(shape, moment_width=2)}
    if shape.trained > shape.parameters / 2:
        without = " without precision: float8" if shape.float8 else ""
        changed[f"lora{without}"] = replace(shape, trained=shape.parameters // 100, frozen_width=shape.width)
    for setting, other in changed.items():
        needed = min(peak_bytes(other, choice, machine.size, sequence_length, machine.memory_bytes) for choice in choices)
        if needed <= USABLE * machine.memory_bytes:
            return f"set {setting}, which needs about {needed / GIB:.0f} GiB, or take more or larger GPUs"
    return "take more or larger GPUs, or lower data.sequence_length"


def _least_recomputed(shape: Shape, choice: Choice, machine: Machine, sequence_length: int) -> Choice:
    """The choice with as few recomputed blocks as memory allows, or all of them."""
    for count in range(shape.num_blocks):
        choice = replace(choice, recomputed=count)
        if peak_bytes(shape, choice, machine.size, sequence_length, machine.memory_bytes) <= USABLE * machine.memory_bytes:
            return choice
    return replace(choice, recomputed=shape.num_blocks)
