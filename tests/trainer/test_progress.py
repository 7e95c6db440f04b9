"""What a terminal is shown of texts that come from data and models."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trainer.progress import Progress, show_rows

HOSTILE = "a b\n\x1b[31mRED\x1b]0;pwned\x07 \x9b2J \u202e c\r"
SHOWN = "a b\n�[31mRED�]0;pwned� �2J � c�"


class Texts:
    """Stands in for rows, plan and tokenizer of one row that reads HOSTILE."""

    train: Any
    files = ("rows\x1b[2J.jsonl",)

    def step_packs(self, step: int) -> list[list[int]]:
        return [[0], [0]]

    def decode(self, ids: Any) -> str:
        return HOSTILE + "."


class Row:
    files, lines = (0,), (1,)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([1, 2]), np.array([True, True])


def test_control_characters_of_rows_never_reach_the_terminal() -> None:
    out = io.StringIO()
    texts = Texts()
    texts.train = Row()
    show_rows(texts, texts, texts, Console(file=out, soft_wrap=True))
    assert f"[[{SHOWN}.]]" in out.getvalue()
    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e\r")


def test_a_row_that_a_step_sees_twice_is_shown_once() -> None:
    out = io.StringIO()
    texts = Texts()
    texts.train = Row()
    show_rows(texts, texts, texts, Console(file=out, soft_wrap=True))
    assert out.getvalue().count(":1: 2 tokens, 2 of them supervised") == 1


def test_control_characters_of_samples_never_reach_the_terminal() -> None:
    progress = Progress("runs/a")
    progress.console.file = io.StringIO()
    row = {"step": 0, "eval_loss": 1.0, "eval_perplexity": 2.0, "eval_accuracy": 0.5}
    for step in range(2):
        progress.row(row | {"step": step, "samples": [{"prompt": HOSTILE, "answer": HOSTILE}]})
    assert "after:" in progress.console.file.getvalue()
    assert not set(progress.console.file.getvalue()) & set("\x1b\x07\x9b\u202e\r")


def test_each_start_of_workers_is_told_with_its_first_new_step_and_the_seconds_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.progress.time.monotonic", lambda: now[0])
    progress = Progress("runs/a")
    progress.console.file = io.StringIO()
    loss = {"num_steps": 99, "loss": 1.0, "lr": 1e-3, "tokens_per_second": 1.0, "mfu": None, "seconds_left": 0.0}

    def step(number: int, seconds: float, workers: int = 2, groups: int = 1) -> None:
        now[0] += seconds
        progress.groups = groups
        progress.row(loss | {"step": number, "workers": workers})

    step(21, 14.0)
    step(22, 1.0)
    step(21, 9.0, workers=1, groups=2)  # again, from a checkpoint
    step(22, 1.0, workers=1, groups=2)
    step(23, 2.0, workers=1, groups=2)
    step(24, 5.0, groups=4)  # one start came to nothing
    assert progress.starts == [
        {"step": 21, "workers": 2, "seconds": 14.0},
        {"step": 23, "workers": 1, "seconds": 12.0},
        {"step": 24, "workers": 2, "seconds": 5.0},
    ]
    assert "step 23 is the first new one on 1 worker, after 12.0 s" in progress.console.file.getvalue()
