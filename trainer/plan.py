"""`ray-finetune plan`: what a run needs and how fast it goes on each EC2 instance type, before anyone pays for one.

Arithmetic of trainer.estimate over the catalogue of instance types that the chart has as well; nothing here is measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config import InputError, RunFile
from trainer.estimate import (
    GIB,
    SOCKET_BYTES,
    Choice,
    Machine,
    Shape,
    Times,
    choose,
    find_gpu,
    peak_bytes,
    step_times,
    without_float8,
)

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One instance type: a choice and its times, or why it cannot be."""

    name: str
    machine: Machine
    refused: str | None = None
    choice: Choice | None = None
    memory_bytes: float = 0.0
    times: Times | None = None
    tokens_per_second: float = 0.0


def catalogue() -> dict[str, dict[str, Any]]:
    """Instance types by name, each with its row of instance-types.yaml: in a wheel beside this file, in a checkout the chart's."""
    beside = HERE / "instance-types.yaml"
    file = beside if beside.is_file() else HERE.parent / "charts" / "ray-finetune" / "files" / "instance-types.yaml"
    return yaml.safe_load(file.read_text())


def machine_of(facts: dict[str, Any], nodes: int) -> Machine | None:
    """`nodes` nodes of a catalogue's type; None where the GPU's data sheet is not known."""
    gpu = find_gpu(facts["gpu_model"])
    if gpu is None:
        return None
    network = facts["network_mbps"] * 1e6 / 8
    return Machine(
        gpu,
        facts["gpu_mem_mib_each"] * 2**20,
        facts["gpu_count"],
        nodes,
        network if facts["efa"] else min(network, SOCKET_BYTES),
    )


def plan_row(name: str, machine: Machine, shape: Shape, run: RunFile) -> Row:
    config = run.trainer
    sequences, length = config.batch.sequences, config.data.sequence_length
    if sequences < machine.size:
        return Row(
            name, machine, f"batch.sequences is {sequences}, and there are {machine.size} GPUs; set it to a multiple of them"
        )
    if config.precision == "float8" and not machine.gpu.float8:
        return Row(name, machine, without_float8("its GPU"))
    try:
        choice = choose(shape, machine, sequences, length, config.batch.micro_batch, config.recompute_blocks)
    except InputError as error:
        return Row(name, machine, str(error))
    times = step_times(shape, choice, machine, sequences, length)
    needed = peak_bytes(shape, choice, machine.size, length, machine.memory_bytes)
    return Row(name, machine, None, choice, needed, times, sequences * length / times.step)


def too_small(run: RunFile, folder: Path) -> str | None:
    """Why the run's own instance type cannot hold a step of the model in `folder`, by the estimate; None where it can, or is not known."""
    name = run.hardware.instance_type
    facts = catalogue().get(name) if name else None
    machine = machine_of(facts, run.hardware.nodes) if facts else None
    return plan_row(name, machine, model_shape(run, folder), run).refused if name and machine else None


def num_tokens(run: RunFile) -> int | None:
    """Tokens that the run trains on; None where only its data can say."""
    config = run.trainer
    if config.duration.steps:
        return config.duration.steps * config.batch.sequences * config.data.sequence_length
    return config.duration.tokens


def model_shape(run: RunFile, folder: Path | None = None) -> Shape:
    """Of the run's model, from its config.json alone, which is fetched where no folder with it is given."""
    import torch

    from trainer.float8 import convert
    from trainer.model import build_model, fetch_model
    from trainer.parallel import blocks

    dtype = torch.float32 if run.trainer.precision == "float32" else torch.bfloat16
    model = build_model(folder or fetch_model(run.trainer, weights=False), run.trainer, "sdpa", dtype)
    if run.trainer.precision == "float8":
        convert(model)
    return Shape.of(model, blocks(model), dtype.itemsize, run.trainer.optim.moments)


def plan(run: RunFile, nodes: int | None, prices: dict[str, float]) -> str:
    """The table, best first; InputError where the run names an instance type on which it cannot be."""
    types = catalogue()
    for name in prices.keys() - types.keys():
        raise InputError(f"--price: {name} is not in the catalogue of instance types; give one of its names")
    nodes = nodes or run.hardware.nodes
    shape, tokens = model_shape(run), num_tokens(run)
    machines = {name: machine_of(facts, nodes) for name, facts in types.items()}
    rows = [plan_row(name, machine, shape, run) for name, machine in machines.items() if machine]
    own = next((row for row in rows if row.name == run.hardware.instance_type), None)
    if own and own.refused:
        raise InputError(f"{nodes} x {own.name}: {own.refused}")
    lines = [
        f"{shape.parameters / 1e9:.2f} B parameters; {run.trainer.batch.sequences} sequences of "
        f"{run.trainer.data.sequence_length} tokens a step; {nodes} node{'s' if nodes > 1 else ''} of each type",
        "estimated: compute from data sheets at the share measured on an H200 (half, assumed, on others), network as on g6.12xlarge",
        "",
        f"{'instance type':<18}{'GPUs':>5}{'micro-batch':>12}{'recomputed':>11}{'weights':>9}{'GiB':>6}{'tokens/s':>11}"
        f"{'waits':>7}{'hours' if tokens else 'h / 1e9':>9}{'USD' if prices else '':>10}",
    ]
    for row in sorted((row for row in rows if not row.refused), key=lambda row: -row.tokens_per_second):
        lines.append(_line(row, shape, tokens or 10**9, prices))
    if refused := [row for row in rows if row.refused]:
        lines += ["", "cannot be:", *(f"  {row.name}: {row.refused}" for row in refused)]
    if unknown := [name for name, machine in machines.items() if machine is None]:
        lines += ["", f"not estimated, as the data sheets of their GPUs are not known here: {', '.join(unknown)}"]
    if not prices:
        lines += ["", "no cost, as prices are not known here: give --price TYPE=USD-AN-HOUR"]
    return "\n".join(lines)


def _line(row: Row, shape: Shape, tokens: int, prices: dict[str, float]) -> str:
    assert row.choice and row.times
    hours = tokens / row.tokens_per_second / 3600
    weights = row.choice.gathered if row.machine.size > 1 else "whole"
    cost = f"{hours * row.machine.nodes * prices[row.name]:>10,.2f}" if row.name in prices else ""
    return (
        f"{row.name:<18}{row.machine.size:>5}{row.choice.micro_batch:>12}{f'{row.choice.recomputed}/{shape.num_blocks}':>11}"
        f"{weights:>9}{row.memory_bytes / GIB:>6.0f}{row.tokens_per_second:>11,.0f}"
        f"{row.times.transfers / row.times.step:>7.0%}{hours:>9,.1f}{cost}"
    )
