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
from trainer.best import Best
from trainer.checkpoint import Checkpoints
from trainer.choices import decide
from trainer.config import Hardware, InputError, RunError, RunFile, TrainerConfig
from trainer.export import export
from trainer.float8 import use_float8
from trainer.inputs import Sets, load_sets, read_inputs
from trainer.lora import describe_adapters, init_adapters
from trainer.metrics import Journal, Meter
from trainer.model import answer, build_model, check_head, fetch_model, load_pretrained, load_tokenizer, loss_inputs
from trainer.optim import build_optimizer, gradient_norm, guarded_step, learning_rate, set_learning_rate
from trainer.packing import MicroBatch, Plan, micro_batches, num_tokens, pack, total_weight
from trainer.parallel import (
    Reading,
    Watchdog,
    Wish,
    World,
    begin_pass,
    compile_blocks,
    compute_type,
    free_gathered,
    recompute,
    shard,
    weights_changed,
)
from trainer.storage import open_storage
from trainer.tokens import Tokens

Ending = Literal["complete", "interrupted"]


def train(run: RunFile, world: World, report: Callable[[dict[str, Any]], None]) -> Ending:
    """Trains until the run's end or until someone asks to stop; `report` is told of every row of metrics.jsonl, and what was picked."""
    config = run.trainer
    storage = open_storage(run.uri, config.storage)
    inputs = read_inputs(storage)
    assert inputs is not None, "the driver writes inputs.json before any worker starts"
    folder = fetch_model(config, weights=True, revision=inputs.model_revision)
    sets = load_sets(config, inputs)
    plan = Plan(sets.train, config)

    model, config = make_model(folder, config, run.hardware, world, lambda line: report({"say": line}))
    optimizer = build_optimizer(model, config.optim)
    checkpoints = Checkpoints(storage, config.checkpoint, world, model, optimizer)
    step = checkpoints.restore()
    base = load_base(model, folder, config, step, checkpoints.loop, world)
    journal = Journal(storage, step, world.is_main, report, checkpoints.check_newest)
    held_out = HeldOut(config, sets, folder, world)
    best = Best(config.best, checkpoints.loop.get("best", {}))

    def measure(step: int, samples: bool) -> None:
        if measured := held_out.measure(model, samples):
            finite(step, "held-out loss", measured["eval_loss"])
            row = {"step": step, "num_steps": plan.num_steps, **measured}
            journal.add(row)
            best.note(row)

    if step == 0 or best.misses(step, config.evaluate.every_steps):
        measure(step, samples=step == 0)

    world.watchdog = Watchdog(config.hang_seconds)
    meter = Meter(model, config.data.sequence_length, plan.num_steps, world)
    under_way = UnderWay(config, meter, journal.add, checkpoints.loop.get("skipped_steps", 0))
    gc.collect()
    gc.freeze()  # what is there by now stays: later collections need not look at it
    wish = Wish.NOTHING
    over = step == plan.num_steps or best.ends
    while not over and wish != Wish.LEAVE:
        step += 1
        packs = plan.step_packs(step)
        lr = learning_rate(step, plan.num_steps, config.optim.lr, config.schedule)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed + step * world.size + world.rank)  # dropout, where a model has it
        loss, norm = train_step(model, optimizer, sets.train, packs, config, world)
        under_way.finish()  # the step before, while the device works on this one
        under_way.add(step, lr, num_tokens(sets.train, packs), world.now(), world.sum_later(loss), Reading(norm))

        wish = world.wish()
        over = step == plan.num_steps
        every = config.evaluate.every_steps
        measuring = bool(every) and step % every == 0 and not over and wish != Wish.LEAVE
        saving = wish != Wish.NOTHING or over or step % config.checkpoint.every_steps == 0
        if saving or measuring or not world.runs_ahead:
            under_way.finish(log=saving)
        if saving or measuring:
            optimizer.zero_grad(set_to_none=True)  # gradients have done their work; what follows needs their memory
        if measuring:
            measure(step, samples=False)
            saving, over = saving or best.step == step, best.ends
            meter.pause()
        if saving or over:
            journal.flush()
            checkpoints.save(step, {"skipped_steps": under_way.skipped_steps, "best": best.state, "base": base})
            meter.pause()

    checkpoints.finish()
    if not over:
        return "interrupted"
    if best.noted < step:
        measure(step, samples=config.best is None)
    if config.best:
        exported = best_weights(model, step, best, checkpoints)
        journal.add({"step": step, "num_steps": plan.num_steps, "exported_step": exported, "best": best.facts})
        measure(exported, samples=True)
    world.main_first(checkpoints.check_newest)
    export(model, folder, config, storage, sets.end_of_turn, world)
    world.main_first(checkpoints.clear_unfinished)
    journal.flush()
    return "complete"


def make_model(
    folder: Path, config: TrainerConfig, hardware: Hardware, world: World, say: Callable[[str], None] = print
) -> tuple[Any, TrainerConfig]:
    """The model over all ranks, without its weights, made for the device, and the settings with what that decided."""
    dtype = compute_type(config, world.device)
    attention = choose_attention(AutoConfig.from_pretrained(folder), config, world.device, dtype)
    model = build_model(folder, config, attention, dtype)
    if config.lora and world.is_main:
        say(describe_adapters(model))
    compile_blocks(model, config, world.device)
    if config.precision == "float8":
        use_float8(model, world.device)
    config, choice = decide(model, config, hardware, dtype, world, say)
    recompute(model, choice.recomputed)
    return shard(model, world, dtype, choice.gathered), config


def load_base(model: Any, folder: Path, config: TrainerConfig, step: int, loop: dict[str, Any], world: World) -> int:
    """Gives the model what no checkpoint holds: at step 0 all weights, later the frozen ones, which must be those that the run began with.

    Returns what the checkpoints of the run know them by. A collective.
    """
    base = round(world.sum(load_pretrained(model, folder, frozen_only=step > 0) % 2**40)[0]) % 2**40
    if loop.get("base", base) != base:
        raise InputError(
            f"model.path: the frozen weights in {config.model.path} are not those that this run began with; "
            "put those back, or start a run of another name"
        )
    if step == 0:
        init_adapters(model, config.seed)
        check_head(model, world.device)
    return base


def best_weights(model: Any, step: int, best: Best, checkpoints: Checkpoints) -> int:
    """Makes the model's weights those that are to be exported, and returns their step: the best one, or `step`, the last."""
    assert best.config
    if not best.config.export or best.step is None or best.step == step:
        return step
    found = checkpoints.load(best.step)
    weights_changed(model)
    if found:
        return best.step
    if checkpoints.world.is_main:
        print(f"warning: no whole checkpoint of step {best.step}, the best one, is left: step {step} is exported", flush=True)
    return step


class UnderWay:
    """The step whose numbers are not known yet. A GPU is given the next step before it has ended this one."""

    def __init__(self, config: TrainerConfig, meter: Meter, record: Callable[[dict[str, Any]], None], skipped_steps: int):
        self.config, self.meter, self.record = config, meter, record
        self.skipped_steps = skipped_steps  # of the whole run
        self.first = True  # of this attempt, which is always logged: it says that the run goes on
        self.finish_step: Callable[[bool], None] | None = None

    def add(self, step: int, lr: float, tokens: int, ended: Any, loss: Reading, norm: Reading) -> None:
        def finish(log: bool) -> None:
            values = {"loss": loss.values()[0], "grad_norm": norm.values()[0], "lr": lr}
            if not math.isfinite(values["grad_norm"]) and self.skipped_steps < self.config.optim.max_skipped_steps:
                self.skipped_steps += 1  # the device has left it out
                self.record({"step": step, "num_steps": self.meter.num_steps, "skipped_steps": self.skipped_steps})
                return
            finite(step, "gradient norm", values["grad_norm"])
            finite(step, "loss", values["loss"])
            self.meter.step(tokens, ended)
            if log or self.first or step % self.config.log_every_steps == 0:
                self.record(self.meter.row(step, **values))
            self.first = False

        self.finish_step = finish

    def finish(self, log: bool = False) -> None:
        """Waits for the step, checks its numbers and logs them when it is their turn, or with `log`. Where there is none, nothing."""
        if self.finish_step is not None:
            self.finish_step(log)
        self.finish_step = None


def train_step(
    model: Any,
    optimizer: torch.optim.AdamW,
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
        begin_pass(model, last=number == len(batches))
        loss = batch_loss(model, batch, world) * weight
        (loss * world.size).backward()
        total += loss.detach()
    norm = gradient_norm(model)
    guarded_step(optimizer, norm, config.optim.clip_norm)
    weights_changed(model)
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
