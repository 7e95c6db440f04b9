"""What a terminal is shown of texts that come from data and models."""

import io
from typing import Any

import numpy as np
from rich.console import Console

from trainer.progress import Progress, show_rows

HOSTILE = "a b\n\x1b[31mRED\x1b]0;pwned\x07 \x9b2J \u202e c\r"
SHOWN = "a b\n�[31mRED�]0;pwned� �2J � c�"


class Texts:
    """Stands in for rows, plan and tokenizer of one row that reads HOSTILE."""

    train: Any
    files = ("rows\x1b[2J.jsonl",)

    def step_packs(self, step: int) -> list[list[int]]:
        return [[0]]

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


def test_control_characters_of_samples_never_reach_the_terminal() -> None:
    progress = Progress("runs/a")
    progress.console.file = io.StringIO()
    row = {"step": 0, "eval_loss": 1.0, "eval_perplexity": 2.0, "eval_accuracy": 0.5}
    for _ in range(2):
        progress.row(row | {"samples": [{"prompt": HOSTILE, "answer": HOSTILE}]})
    assert "after:" in progress.console.file.getvalue()
    assert not set(progress.console.file.getvalue()) & set("\x1b\x07\x9b\u202e\r")
