"""One worker's part of a run: build, restore, train, save, evaluate, export. The loop reads top to bottom.

The same function runs under Ray Train, under torchrun and as one process; who started it is behind `World`.
"""

import gc
import json
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig

from trainer.attention import choose_attention
from trainer.checkpoint import Checkpoints
from trainer.config import RunError, RunFile, TrainerConfig
from trainer.data import MicroBatch, Plan, Tokens, epoch_zero, micro_batches, num_supervised, num_tokens
from trainer.metrics import Journal, Meter
from trainer.model import answer, build_model, check_head, export, fetch_model, load_pretrained, load_tokenizer, loss_inputs
from trainer.optim import build_optimizer, clip_gradients, guarded_step, learning_rate, set_learning_rate
from trainer.parallel import Reading, World, accumulate, compile_blocks, compute_type, free_gathered, shard
from trainer.storage import Storage, open_storage

Ending = Literal["complete", "interrupted"]


def train(run: RunFile, world: World, report: Callable[[dict[str, Any]], None]) -> Ending:
    """Trains until the run's end or until someone asks to stop; `report` is told of every row of metrics.jsonl."""
    config = run.trainer
    storage = open_storage(run.uri, config.storage)
    folder = fetch_model(config, weights=True)
    tokens = Tokens.from_bytes(storage.read("data/train.npz"))
    plan = Plan(tokens, config)

    dtype = compute_type(config, world.device)
    attention = choose_attention(AutoConfig.from_pretrained(folder), config, world.device, dtype)
    model = build_model(folder, config, attention)
    compile_blocks(model, config, world.device)
    model = shard(model, world, dtype)
    optimizer = build_optimizer(model, config.optim)
    checkpoints = Checkpoints(storage, config.checkpoint.keep, world)
    step = checkpoints.restore(model, optimizer)
    if step == 0:
        load_pretrained(model, folder)
        check_head(model, world.device)
        free_gathered(model)

    journal = Journal(storage, step)
    held_out = HeldOut(config, storage, folder, world)

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

    meter = Meter(model, config.data.sequence_length, plan.num_steps, world)
    under_way = UnderWay(config.log_every_steps, meter, record)
    gc.collect()
    gc.freeze()  # what is there by now stays: later collections need not look at it
    stopping = False
    while step < plan.num_steps and not stopping:
        step += 1
        packs = [plan.rows(number) for number in plan.step_packs(step)]
        lr = learning_rate(step, plan.num_steps, config.optim.lr, config.schedule)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed + step * world.size + world.rank)  # dropout, where a model has it
        loss, norm = train_step(model, optimizer, tokens, packs, config, world)
        under_way.finish()  # the step before, while the device works on this one
        under_way.add(step, lr, num_tokens(tokens, packs), world.sum_later(loss), Reading(norm))

        stopping = world.stopping()
        last = stopping or step == plan.num_steps
        saving = last or step % config.checkpoint.every_steps == 0
        every = config.evaluate.every_steps
        measuring = bool(every) and step % every == 0 and not last
        if saving or measuring or not world.runs_ahead:
            under_way.finish(log=saving)
        if saving:
            if world.is_main:
                journal.flush()
            checkpoints.save(step, model, optimizer)
            meter.pause()
        if measuring:
            measure(samples=False)
            meter.pause()

    if step < plan.num_steps:
        return "interrupted"
    measure(samples=True)
    export(model, folder, storage, held_out.end_of_turn, world)
    if world.is_main:
        journal.flush()
    return "complete"


class UnderWay:
    """The step whose numbers are not known yet. A GPU is given the next step before it has ended this one."""

    def __init__(self, log_every_steps: int, meter: Meter, record: Callable[[dict[str, Any]], None]):
        self.log_every_steps, self.meter, self.record = log_every_steps, meter, record
        self.finish_step: Callable[[bool], None] | None = None

    def add(self, step: int, lr: float, tokens: int, loss: Reading, norm: Reading) -> None:
        def finish(log: bool) -> None:
            values = {"loss": loss.values()[0], "grad_norm": norm.values()[0], "lr": lr}
            finite(step, "gradient norm", values["grad_norm"])
            finite(step, "loss", values["loss"])
            self.meter.step(tokens)
            if log or step % self.log_every_steps == 0:
                self.record(self.meter.row(step, **values))

        self.finish_step = finish

    def finish(self, log: bool = False) -> None:
        """Waits for the step, checks its numbers and logs them when it is their turn, or with `log`. Where there is none, nothing."""
        if self.finish_step is not None:
            self.finish_step(log)
        self.finish_step = None


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: Tokens,
    packs: list[np.ndarray],
    config: TrainerConfig,
    world: World,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimiser step over all packs; returns this rank's part of the loss and the gradient's norm before clipping.

    The loss is a sum over tokens divided by the supervised tokens of the whole step, so that neither accumulation nor
    the number of workers changes it. FSDP averages gradients over ranks; the factor `world.size` undoes that.
    """
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=world.device)
    weight = 1 / num_supervised(tokens, packs)
    batches = micro_batches(tokens, packs, config, world.rank, world.size)
    for number, batch in enumerate(batches, start=1):
        accumulate(model, world, last=number == len(batches))
        loss = batch_loss(model, batch, world) * weight
        (loss * world.size).backward()
        total += loss.detach()
    norm = clip_gradients(model, config.optim.clip_norm)
    guarded_step(optimizer, norm)
    return total, norm


def batch_loss(model: Any, batch: MicroBatch, world: World) -> torch.Tensor:
    """Weighted sum of the losses of a micro-batch's supervised tokens."""
    return model.supervised_loss(**loss_inputs(model, batch, world.device))


def finite(step: int, what: str, value: float) -> None:
    """Ends the run where a value, which all ranks have, is no number; the weights have been kept from it."""
    if not math.isfinite(value):
        raise RunError(f"the {what} of step {step} is {value}; lower optim.lr, or raise schedule.warmup_steps")


class HeldOut:
    """What is measured on rows that are not trained on; without such rows, nothing."""

    def __init__(self, config: TrainerConfig, storage: Storage, folder: Any, world: World):
        self.config, self.world = config, world
        self.tokens = Tokens.from_bytes(storage.read("data/eval.npz")) if config.data.eval else None
        facts = json.loads(storage.read("data/facts.json"))
        self.prompts, self.end_of_turn = facts["prompts"], facts["end_of_turn"]
        self.tokenizer = load_tokenizer(folder) if self.prompts else None

    @torch.no_grad()
    def measure(self, model: Any, samples: bool) -> dict[str, Any]:
        """Mean loss over exactly the supervised tokens, each once, and answers to the prompts. A collective."""
        if self.tokens is None:
            return {}
        model.eval()
        packs = epoch_zero(self.tokens, self.config)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for batch in micro_batches(self.tokens, packs, self.config, self.world.rank, self.world.size):
            total += batch_loss(model, batch, self.world)
        row: dict[str, Any] = {"eval_loss": self.world.sum(total.item())[0] / num_supervised(self.tokens, packs)}
        if samples:
            row["samples"] = [prompt | {"answer": self._answer(model, prompt)} for prompt in self.prompts]
        model.train()
        free_gathered(model)
        return row

    def _answer(self, model: Any, prompt: dict[str, Any]) -> str:
        length = self.config.evaluate.max_new_tokens
        return answer(model, self.tokenizer, prompt["messages"], length, self.end_of_turn, self.world.device)
