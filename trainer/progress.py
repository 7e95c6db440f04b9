"""What a run shows in a terminal: one line in place on a TTY, one line a logged step elsewhere."""

import itertools
import os
import re
import sys
import time
from typing import Any

from rich.console import Console
from rich.text import Text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read the lines has left; the run goes on without saying anything."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere


class Progress:
    def __init__(self, uri: str):
        self.console = _Console(highlight=False, soft_wrap=True)
        self.uri, self.step = uri, 0
        self.starts: list[dict[str, Any]] = []  # of workers: their first new step, and the seconds without one before it
        self.groups = 1  # of workers that have begun, of which `told` have made a new step, or will not any more
        self.told = 0
        self.stepped_at = time.monotonic()  # the last new step, and before the first the start of this process
        self.exported: dict[str, Any] | None = None  # which weights, where there was a choice
        self.shown = ""
        self.before: dict[str, Any] | None = None  # the evaluation before the first step
        # Under torchrun every process has one of these; rank 0 alone speaks and keeps the run's records.
        self.silent = os.environ.get("RANK", "0") != "0"

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.silent:
            self._clear()
            self.console.print(text, markup=False)
            if self.shown:
                self._draw()

    def row(self, row: dict[str, Any]) -> None:
        """Shows a row of metrics.jsonl, or what a worker has to say."""
        if "say" in row:
            return self.say(row["say"])
        if "loss" in row and row["step"] > self.step:
            self._stepped(row)
        self.step = max(self.step, row["step"])
        if "eval_loss" in row:
            self._evaluated(row)
        if "skipped_steps" in row:
            self.say(f"step {row['step']} is left out, as its gradient is no number ({row['skipped_steps']} of the run so far)")
        if "exported_step" in row:
            self.exported = {"step": row["exported_step"], "best": row["best"]}
        if "loss" not in row or self.silent:
            return None
        width = len(str(row["num_steps"]))
        used = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
        self.shown = (
            f"step {row['step']:>{width}}/{row['num_steps']}  loss {row['loss']:.3f}  lr {row['lr']:.1e}  "
            f"{row['tokens_per_second']:,.0f} tokens/s{used}  {clock(row['seconds_left'])} left"
        )
        return self._draw()

    def _stepped(self, row: dict[str, Any]) -> None:
        """Notes a new step, and whether it is the first one of the workers that began last."""
        now = time.monotonic()
        if self.told < self.groups:
            self.told = self.groups
            self.starts.append({"step": row["step"], "workers": row["workers"], "seconds": round(now - self.stepped_at, 1)})
            if row["step"] > 1:
                self.say(describe_start(self.starts[-1]))
        self.stepped_at = now

    def _evaluated(self, row: dict[str, Any]) -> None:
        if self.before is None:
            self.before = row
            return self.say(f"held-out before training: {_held_out(row)}")
        if row["step"] == self.before["step"]:  # told again by workers that began anew
            return None
        self.say(f"held-out: {_held_out(row)} (loss before: {self.before['eval_loss']:.3f})")
        before = {question_of(sample): sample["answer"] for sample in self.before.get("samples", [])}
        for sample in row.get("samples", []):
            question = question_of(sample)
            shown = f"  {question}\n    before: {before.get(question, '(not asked)')}\n    after:  {sample['answer']}"
            self.say(printable(shown))
        return None

    def ended(self, ending: str, save_seconds: float | None) -> None:
        if ending == "complete":
            self.say(f"complete: {self.uri}/model is the model{self._choice()}, {self.uri}/report.html the report")
        else:
            saved = "saved" if save_seconds is None else f"saved {save_seconds} s after it was asked to"
            self.say(f"interrupted after step {self.step}, {saved}; run the same command again to go on")

    def _choice(self) -> str:
        if self.exported is None:
            return ""
        best = self.exported["best"]
        return f" of step {self.exported['step']} (the best {best['metric']}, {best['value']:.4g}, is of step {best['step']})"

    def close(self) -> None:
        """Ends the line in place."""
        if self.shown and self.console.is_terminal:
            self.console.print()
        self.shown = ""

    def _draw(self) -> None:
        if self.console.is_terminal:
            self._clear()
            self.console.print(self.shown, end="", markup=False)
        else:
            self.console.print(self.shown, markup=False)
            self.shown = ""

    def _clear(self) -> None:
        if self.console.is_terminal and self.shown:
            self.console.file.write("\r\x1b[2K")


def describe_start(start: dict[str, Any]) -> str:
    """One of `Progress.starts`."""
    workers = "1 worker" if start["workers"] == 1 else f"{start['workers']} workers"
    return f"step {start['step']} is the first new one on {workers}, after {start['seconds']} s"


def _held_out(row: dict[str, Any]) -> str:
    figures = f"loss {row['eval_loss']:.3f}, perplexity {row['eval_perplexity']:,.2f}, {row['eval_accuracy']:.1%} of tokens right"
    sets = [
        f"{key[5:-5]} {value:.3f}"
        for key, value in row.items()
        if key.startswith("eval_") and key.endswith("_loss") and key != "eval_loss"
    ]
    return figures + (f" ({', '.join(sets)})" if sets else "")


def question_of(sample: dict[str, Any]) -> str:
    """What a sample asks, as a person reads it: the last message before the answer, or the prompt."""
    return sample["messages"][-1]["content"] if "messages" in sample else sample["prompt"]


def printable(text: str) -> str:
    """A text of data or model without what would move a terminal's cursor, colour it or turn its writing round."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def show_rows(sets: Any, plan: Any, tokenizer: Any, console: Console, count: int = 3) -> None:
    """Prints the first rows that training will see as text: what is learnt on green, or in brackets without colours."""
    rows = list(dict.fromkeys(row for pack in plan.step_packs(1) for row in pack))[:count]  # few rows may come twice in a step
    for row in rows:
        ids, supervised = sets.train[row]
        place = f"{printable(sets.files[sets.train.files[row]])}:{sets.train.lines[row]}"
        text = Text(f"{place}: {len(ids):,} tokens, {int(supervised.sum()):,} of them supervised\n", "bold")
        for start, stop, on in _runs(supervised):
            part = printable(tokenizer.decode(ids[start:stop]))
            colours = console.is_terminal and not console.no_color
            text.append(f"[[{part}]]" if on and not colours else part, "not bold white on dark_green" if on else "not bold dim")
        text.rstrip()
        console.print(text, "", sep="\n")


def _runs(mask: Any) -> list[tuple[int, int, bool]]:
    """(start, stop, value) of each stretch of equal values."""
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(start, stop, bool(mask[start])) for start, stop in itertools.pairwise(edges)]


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
