"""What a run shows in a terminal: one line in place on a TTY, one line a logged step elsewhere."""

import os
import sys
from typing import Any

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read the lines has left; the run goes on without saying anything."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere


class Progress:
    def __init__(self, uri: str):
        self.console = _Console(highlight=False, soft_wrap=True)
        self.uri, self.step = uri, 0
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
        """Shows a row of metrics.jsonl."""
        self.step = row["step"]
        if "eval_loss" in row:
            self._evaluated(row)
        if "loss" not in row or self.silent:
            return
        width = len(str(row["num_steps"]))
        used = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
        self.shown = (
            f"step {row['step']:>{width}}/{row['num_steps']}  loss {row['loss']:.3f}  lr {row['lr']:.1e}  "
            f"{row['tokens_per_second']:,.0f} tokens/s{used}  {clock(row['seconds_left'])} left"
        )
        self._draw()

    def _evaluated(self, row: dict[str, Any]) -> None:
        if self.before is None:
            self.before = row
            return self.say(f"held-out loss before training {row['eval_loss']:.3f}")
        self.say(f"held-out loss {row['eval_loss']:.3f} (before: {self.before['eval_loss']:.3f})")
        before = {sample["messages"][-1]["content"]: sample["answer"] for sample in self.before.get("samples", [])}
        for sample in row.get("samples", []):
            question = sample["messages"][-1]["content"]
            self.say(f"  {question}\n    before: {before.get(question, '(not asked)')}\n    after:  {sample['answer']}")
        return None

    def ended(self, ending: str) -> None:
        if ending == "complete":
            self.say(f"complete: {self.uri}/model is the model, {self.uri}/report.html the report")
        else:
            self.say(f"interrupted after step {self.step}, saved; run the same command again to go on")

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


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
