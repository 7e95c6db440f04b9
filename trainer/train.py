"""One worker's part of a run: build, restore, train, save, evaluate, export. The loop reads top to bottom.

The same function runs under Ray Train, under torchrun and as one process; who started it is behind `World`.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from trainer.checkpoint import Checkpoints
from trainer.config import RunError, RunFile, TrainerConfig
from trainer.inputs import Sets, load_sets, read_inputs
from trainer.metrics import Journal, Meter
from trainer.model import answer, build_model, check_head, choose_attention, export, fetch_model, load_pretrained, load_tokenizer
from trainer.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from trainer.packing import MicroBatch, Plan, micro_batches, num_tokens, pack, total_weight
from trainer.parallel import Watchdog, World, compute_type, free_gathered, shard
from trainer.storage import open_storage
from trainer.tokens import Tokens

Ending = Literal["complete", "interrupted"]


def train(run: RunFile, world: World, report: Callable[[dict[str, Any]], None]) -> Ending:
    """Trains until the run's end or until someone asks to stop; `report` is told of every row of metrics.jsonl."""
    config = run.trainer
    storage = open_storage(run.uri, config.storage)
    inputs = read_inputs(storage)
    assert inputs is not None, "the driver writes inputs.json before any worker starts"
    folder = fetch_model(config, weights=True, revision=inputs.model_revision)
    sets = load_sets(config, inputs)
    plan = Plan(sets.train, config)

    model = build_model(folder, config, choose_attention(config, world.device))
    model = shard(model, world, compute_type(config, world.device))
    optimizer = build_optimizer(model, config.optim)
    checkpoints = Checkpoints(storage, config.checkpoint.keep, world, model, optimizer)
    step = checkpoints.restore()
    if step == 0:
        load_pretrained(model, folder)
        check_head(model, world.device)
        free_gathered(model)

    journal = Journal(storage, step, checkpoints.check_newest)
    held_out = HeldOut(config, sets, folder, world)

    def record(row: dict[str, Any]) -> None:
        if world.is_main:
            journal.add(row)
            report(row)

    def measure(samples: bool) -> None:
        if measured := held_out.measure(model, samples):
            finite(step, "held-out loss", measured["eval_loss"])
            record({"step": step, "num_steps": plan.num_steps, **measured})

    if step == 0:
        measure(samples=True)
    elif world.is_main and journal.rows:
        report(journal.rows[0])  # what it was before training, to compare with at the end

    world.watchdog = Watchdog(config.hang_seconds)
    meter = Meter(model, config.data.sequence_length, plan.num_steps, world)
    stopping = False
    while step < plan.num_steps and not stopping:
        step += 1
        packs = plan.step_packs(step)
        lr = learning_rate(step, plan.num_steps, config.optim.lr, config.schedule)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed + step * world.size + world.rank)  # dropout, where a model has it
        loss, norm = train_step(step, model, optimizer, sets.train, packs, config, world)
        meter.step(num_tokens(sets.train, packs))

        stopping = world.stopping()
        last = stopping or step == plan.num_steps
        saving = last or step % config.checkpoint.every_steps == 0
        if saving or step % config.log_every_steps == 0:
            record(meter.row(step, loss=finite(step, "loss", *world.sum(loss.item())), grad_norm=norm, lr=lr))
        if saving:
            world.watchdog.rest()
            if world.is_main:
                journal.flush()
            checkpoints.save(step)
            meter.pause()
        every = config.evaluate.every_steps
        if every and step % every == 0 and not last:
            world.watchdog.rest()
            measure(samples=False)
            meter.pause()

    if step < plan.num_steps:
        checkpoints.finish()
        return "interrupted"
    measure(samples=True)
    checkpoints.finish()
    world.main_first(checkpoints.check_newest)
    export(model, folder, config, storage, sets.end_of_turn, world)
    if world.is_main:
        journal.flush()
    return "complete"


def train_step(
    step: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: Tokens,
    packs: list[np.ndarray],
    config: TrainerConfig,
    world: World,
) -> tuple[torch.Tensor, float]:
    """One optimiser step over all packs; returns this rank's part of the loss and the gradient's norm before clipping.

    The loss is a weighted sum over tokens divided by the weights of the whole step, so that neither accumulation nor the
    number of workers changes it. FSDP averages gradients over ranks; the factor `world.size` undoes that.
    """
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=world.device)
    weight = 1 / total_weight(tokens, packs)
    for batch in micro_batches(tokens, packs, config, world.rank, world.size):
        loss = batch_loss(model, batch, world) * weight
        (loss * world.size).backward()
        total += loss.detach()
    norm = finite(step, "gradient norm", clip_gradients(model, config.optim.clip_norm).item())
    optimizer.step()
    return total, norm


def batch_loss(model: Any, batch: MicroBatch, world: World) -> torch.Tensor:
    """Weighted sum of the losses of a micro-batch's supervised tokens."""
    tensors = (batch.input_ids, batch.position_ids, batch.labels, batch.weights)
    return model.supervised_loss(*(tensor.to(world.device, non_blocking=True) for tensor in tensors))


def finite(step: int, what: str, value: float) -> float:
    """The value, which all ranks have, unless it is no number: it must not reach weights that are then saved."""
    if not math.isfinite(value):
        raise RunError(f"the {what} of step {step} is {value}; lower optim.lr, or raise schedule.warmup_steps")
    return value


class HeldOut:
    """What is measured on rows that are not trained on; without such rows, nothing."""

    def __init__(self, config: TrainerConfig, sets: Sets, folder: Any, world: World):
        self.config, self.sets, self.world = config, sets, world
        self.tokenizer = load_tokenizer(folder, config) if sets.samples else None

    @torch.no_grad()
    def measure(self, model: Any, samples: bool) -> dict[str, Any]:
        """Loss, perplexity and token accuracy of each set, and answers to the samples. A collective."""
        if not self.sets.held_out:
            return {}
        model.eval()
        scores = {name: self._score(model, tokens) for name, tokens in self.sets.held_out.items()}
        row = _figures("eval", sum(scores.values(), torch.zeros(3, dtype=torch.float64)))
        if len(scores) > 1:
            for name, score in scores.items():
                row |= _figures(f"eval_{name}", score)
        if samples:
            row["samples"] = [sample | {"answer": self._answer(model, sample)} for sample in self.sets.samples]
        model.train()
        free_gathered(model)
        return row

    def _score(self, model: Any, tokens: Tokens) -> torch.Tensor:
        """float64 [3]: loss summed over exactly the supervised tokens, each once; how many are right; how many there are."""
        packs = pack(tokens.lengths, self.config.data.sequence_length, np.arange(len(tokens)))
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for batch in micro_batches(tokens, packs, self.config, self.world.rank, self.world.size):
            tensors = (batch.input_ids, batch.position_ids, batch.labels)
            total += model.supervised_scores(*(tensor.to(self.world.device, non_blocking=True) for tensor in tensors))
        return torch.tensor([*self.world.sum(*total.tolist()), float(tokens.labels.sum())], dtype=torch.float64)

    def _answer(self, model: Any, sample: dict[str, Any]) -> str:
        length = self.config.evaluate.max_new_tokens
        return answer(model, self.tokenizer, sample, length, self.sets.end_of_turn, self.world.device)


def _figures(prefix: str, score: torch.Tensor) -> dict[str, Any]:
    loss, right, count = score.tolist()
    mean = loss / count
    return {f"{prefix}_loss": mean, f"{prefix}_perplexity": math.exp(min(mean, 700)), f"{prefix}_accuracy": right / count}
