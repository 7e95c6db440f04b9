"""One worker's part of a run: build, restore, train, save, evaluate, export. The loop reads top to bottom.

The same function runs under Ray Train, under torchrun and as one process; who started it is behind `World`.
"""

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig

from trainer.attention import choose_attention
from trainer.checkpoint import Checkpoints
from trainer.config import RunError, RunFile, TrainerConfig
from trainer.inputs import Sets, load_sets, read_inputs
from trainer.metrics import Journal, Meter
from trainer.model import answer, build_model, check_head, export, fetch_model, load_pretrained, load_tokenizer, loss_inputs
from trainer.optim import build_optimizer, clip_gradients, guarded_step, learning_rate, set_learning_rate
from trainer.packing import MicroBatch, Plan, micro_batches, num_tokens, pack, total_weight
from trainer.parallel import Reading, Watchdog, World, accumulate, compile_blocks, compute_type, free_gathered, shard
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

    model = make_model(folder, config, world)
    optimizer = build_optimizer(model, config.optim)
    checkpoints = Checkpoints(storage, config.checkpoint, world, model, optimizer)
    step = checkpoints.restore()
    if step == 0:
        load_pretrained(model, folder)
        check_head(model, world.device)
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
    under_way = UnderWay(config.log_every_steps, meter, record)
    gc.collect()
    gc.freeze()  # what is there by now stays: later collections need not look at it
    stopping = False
    while step < plan.num_steps and not stopping:
        step += 1
        packs = plan.step_packs(step)
        lr = learning_rate(step, plan.num_steps, config.optim.lr, config.schedule)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed + step * world.size + world.rank)  # dropout, where a model has it
        loss, norm = train_step(model, optimizer, sets.train, packs, config, world)
        under_way.finish()  # the step before, while the device works on this one
        under_way.add(step, lr, num_tokens(sets.train, packs), world.sum_later(loss), Reading(norm))

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
            optimizer.zero_grad(set_to_none=True)  # gradients have done their work; the copy needs their memory
            checkpoints.save(step)
            meter.pause()
        if measuring:
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


def make_model(folder: Path, config: TrainerConfig, world: World) -> Any:
    """The model over all ranks, without its weights, with the attention and the compilation that the device is good for."""
    dtype = compute_type(config, world.device)
    attention = choose_attention(AutoConfig.from_pretrained(folder), config, world.device, dtype)
    model = build_model(folder, config, attention)
    compile_blocks(model, config, world.device)
    return shard(model, world, dtype)


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

    The loss is a weighted sum over tokens divided by the weights of the whole step, so that neither accumulation nor the
    number of workers changes it. FSDP averages gradients over ranks; the factor `world.size` undoes that.
    """
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=world.device)
    weight = 1 / total_weight(tokens, packs)
    batches = list(micro_batches(tokens, packs, config, world.rank, world.size))
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

    def __init__(self, config: TrainerConfig, sets: Sets, folder: Path, world: World):
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
            total += model.supervised_scores(**loss_inputs(model, batch, self.world.device))
            self.world.alive()
        return torch.tensor([*self.world.sum(*total.tolist()), float(tokens.labels.sum())], dtype=torch.float64)

    def _answer(self, model: Any, sample: dict[str, Any]) -> str:
        self.world.alive()
        length = self.config.evaluate.max_new_tokens
        return answer(model, self.tokenizer, sample, length, self.sets.end_of_turn, self.world.device)


def _figures(prefix: str, score: torch.Tensor) -> dict[str, Any]:
    loss, right, count = score.tolist()
    mean = loss / count
    return {f"{prefix}_loss": mean, f"{prefix}_perplexity": math.exp(min(mean, 700)), f"{prefix}_accuracy": right / count}
