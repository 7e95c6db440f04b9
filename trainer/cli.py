"""The command line. Exit codes: 0 done or already complete, 1 failed, 2 refused input, 75 interrupted after saving."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer.config import Hardware, InputError, RunError, RunFile, TrainerConfig, load_settings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

RunOption = Annotated[Path | None, typer.Option("--run", help="run.json, as the chart renders it.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Trainer settings alone, JSON or YAML.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Overrides one setting; may be given again.")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Local worker processes, with --config.")]


@app.command()
def train(run: RunOption = None, config: ConfigOption = None, sets: SetOption = None, workers: WorkersOption = 1) -> None:
    """Train, or go on where an interrupted run stopped. Without a file: the quickstart, a small model on this machine."""
    from trainer.driver import drive

    raise typer.Exit(drive(_load(run, config, sets or [], workers)))


@app.command()
def config(
    run: RunOption = None, config: ConfigOption = None, sets: SetOption = None, workers: WorkersOption = 1, schema: bool = False
) -> None:
    """Print the settings with every default resolved, or with --schema the JSON schema of the trainer's settings."""
    resolved = TrainerConfig.model_json_schema() if schema else _load(run, config, sets or [], workers).model_dump(mode="json")
    print(json.dumps(resolved, indent=2))


@app.command()
def plan(
    run: RunOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes of each type; the run's own number if left out.")
    ] = None,
    prices: Annotated[
        list[str] | None, typer.Option("--price", metavar="TYPE=USD", help="Price of an instance type's hour; may be given again.")
    ] = None,
) -> None:
    """Print memory, speed, hours and cost on each EC2 instance type, as estimated; refuse the run's own where it cannot fit."""
    from trainer.plan import plan as planned

    print(planned(_load(run, config, sets or [], 1), nodes, dict(map(_price, prices or []))))


@app.command()
def preflight(run: RunOption = None, config: ConfigOption = None, sets: SetOption = None, workers: WorkersOption = 1) -> None:
    """Check settings, storage, model and data on a CPU, as training does before it asks for workers."""
    from trainer import driver

    driver.preflight(_load(run, config, sets or [], workers))


@app.command()
def status(run: RunOption = None, config: ConfigOption = None, sets: SetOption = None, workers: WorkersOption = 1) -> None:
    """Print how far a run is: outcome, step, newest checkpoint."""
    from trainer import driver

    driver.status(_load(run, config, sets or [], workers))


@app.command()
def stop(wait: Annotated[bool, typer.Option("--wait", help="Return only when the run has saved.")] = False) -> None:
    """Ask the run on this machine's Ray cluster to save and leave; it exits 75 and can be resumed."""
    from trainer import driver

    driver.stop(wait)


def _load(run: Path | None, config: Path | None, sets: list[str], workers: int) -> RunFile:
    if run and config:
        raise InputError("--run and --config: give one of them")
    if run:
        return load_settings(RunFile, run, [f"trainer.{override}" for override in sets])
    if config:
        return RunFile(trainer=load_settings(TrainerConfig, config, sets), hardware=_local(workers))
    from trainer.quickstart import quickstart

    return quickstart(sets)


def _price(text: str) -> tuple[str, float]:
    name, _, price = text.partition("=")
    try:
        return name, float(price)
    except ValueError:
        raise InputError(f"--price {text}: write the instance type and dollars an hour, such as g6.12xlarge=4.6") from None


def _local(workers: int) -> Hardware:
    """This machine's GPUs if it has some, else its CPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and workers > gpus:
        raise InputError(f"--workers {workers}: this machine has {gpus} GPUs; ask for at most that many")
    cpus = max(1, (os.cpu_count() or 1) // workers)
    return Hardware(workers=workers, cpus_per_worker=cpus, gpus_per_node=workers if gpus else 0)


def main() -> None:
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RunError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
