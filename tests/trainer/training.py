"""What the distributed tests run in their processes."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer import float8
from trainer.config import RunFile, TrainerConfig
from trainer.driver import prepare
from trainer.estimate import Gathered
from trainer.inputs import load_sets, read_inputs
from trainer.lora import adapters, init_adapters
from trainer.model import build_model, load_pretrained
from trainer.optim import build_optimizer, gradient_norm
from trainer.packing import Plan, micro_batches
from trainer.parallel import Wish, full, join_world, own_rows, recompute, shard
from trainer.storage import open_storage
from trainer.tokens import Tokens
from trainer.train import batch_loss, train, train_step


def run_training(settings: dict[str, Any], stop_at: int | None = None) -> dict[str, Any]:
    """One whole run as torchrun would start it; asked to stop when `stop_at` is logged, and so stopped two steps later. Rows, ending and final weights."""
    run = RunFile.model_validate({"trainer": settings})
    rows: list[dict[str, Any]] = []
    with join_world(lambda: Wish.LEAVE if any(row.get("step", 0) == stop_at for row in rows) else Wish.NOTHING) as world:
        world.main_first(lambda: check(run))
        ending = train(run, world, rows.append)
    return {"ending": ending, "rows": rows, "uri": run.uri}


def check(run: RunFile) -> None:
    prepare(run, open_storage(run.uri, run.trainer.storage), lambda text: None)


def training_rows(run: RunFile) -> Tokens:
    inputs = read_inputs(open_storage(run.uri, run.trainer.storage))
    assert inputs
    return load_sets(run.trainer, inputs).train


def weights(uri: str) -> dict[str, torch.Tensor]:
    return load_file(Path(uri, "model", "model.safetensors"))


def step_facts(settings: dict[str, Any], gathered: Gathered = "pass", recomputed: int = 0) -> dict[str, Any]:
    """Loss, gradient norm and full gradients of the first step, and how much of the model this rank holds."""
    run = RunFile.model_validate({"trainer": settings})
    config = run.trainer
    with join_world(lambda: Wish.NOTHING) as world:
        world.main_first(lambda: check(run))
        model: Any = build_model(Path(config.model.path), config, "sdpa")
        recompute(model, recomputed)
        shard(model, world, torch.float32, gathered)
        fill(model, config)
        optimizer = build_optimizer(model, config.optim)
        tokens = training_rows(run)
        plan = Plan(tokens, config)
        packs = plan.step_packs(1)
        loss, norm = train_step(model, optimizer, tokens, packs, config, world)
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        return {
            "loss": world.sum(loss.item())[0],
            "norm": norm.item(),
            "gradients": gradients,
            "norm_after": gradient_norm(model).item(),
            "own": sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters()),
            "all": sum(p.numel() for p in model.parameters()),
        }


def fill(model: Any, config: TrainerConfig) -> None:
    """The weights, and adapters that do something already."""
    load_pretrained(model, Path(config.model.path))
    init_adapters(model, config.seed)
    for layer in adapters(model).values():
        own_rows(layer.lora_B)[0].fill_(0.02)


def loss_and_gradients(settings: dict[str, Any], packs_of_rows: list[list[int]]) -> dict[str, Any]:
    """Summed loss and its gradients over given packs, in one process."""
    import numpy as np

    run = RunFile.model_validate({"trainer": settings})
    config = run.trainer
    with join_world(lambda: Wish.NOTHING) as world:
        check(run)
        model: Any = shard(build_model(Path(config.model.path), config, "sdpa"), world, torch.float32)
        fill(model, config)
        tokens = training_rows(run)
        total = torch.zeros(())
        for batch in micro_batches(tokens, [np.asarray(rows) for rows in packs_of_rows], config, 0, 1):
            loss = batch_loss(model, batch, world)
            loss.backward()
            total += loss.detach()
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": total.item(), "gradients": gradients}


def float8_gradients(settings: dict[str, Any], layers: bool) -> dict[str, Any]:
    """Loss and full gradients of the first step in bfloat16, with `layers` in 8-bit floats where they are linear."""
    run = RunFile.model_validate({"trainer": settings})
    config = run.trainer
    float8.LEAST = 16
    with join_world(lambda: Wish.NOTHING) as world:
        world.main_first(lambda: check(run))
        model: Any = build_model(Path(config.model.path), config, "sdpa")
        if layers:
            float8.convert(model)
        shard(model, world, torch.bfloat16)
        fill(model, config)
        tokens = training_rows(run)
        loss, _ = train_step(model, build_optimizer(model, config.optim), tokens, Plan(tokens, config).step_packs(1), config, world)
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": world.sum(loss.item())[0], "gradients": gradients}


def two_steps(settings: dict[str, Any], fast: bool, recomputed: int = 0) -> dict[str, Any]:
    """Losses of two steps of one process, the gradients of the second, and the parameters' types throughout."""
    run = RunFile.model_validate({"trainer": settings})
    config = run.trainer
    with join_world(lambda: Wish.NOTHING) as world:
        check(run)
        model: Any = build_model(Path(config.model.path), config, "sdpa")
        recompute(model, recomputed)
        shard(model, world, torch.bfloat16 if fast else torch.float32)
        fill(model, config)
        optimizer = build_optimizer(model, config.optim)
        tokens = training_rows(run)
        plan = Plan(tokens, config)
        losses = [train_step(model, optimizer, tokens, plan.step_packs(step), config, world)[0].item() for step in (1, 2)]
        return {
            "losses": losses,
            "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
            "types": {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)},
        }
