"""inputs.json: what a run began with, and what later attempts make of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from stores import chat, write_lines
from tiny import config

from trainer.config import InputError
from trainer.inputs import load_sets, read_inputs, resolve
from trainer.storage import LocalStorage


def resolved(made: Any, folder: Path) -> LocalStorage:
    storage = LocalStorage(str(folder))
    resolve(made, storage, lambda text: None)
    return storage


@pytest.mark.parametrize("content", [b"", b"{half", b"[]", b'{"model_revision": null}'])
def test_a_damaged_or_older_file_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "inputs.json").write_bytes(content)
    with pytest.raises(InputError, match=r"inputs\.json is damaged or of another version; .* data\.version") as refused:
        read_inputs(LocalStorage(str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_equal_tokens_in_another_store_are_used_from_there(tmp_path: Path) -> None:
    made = config(tmp_path)
    storage = resolved(made, tmp_path / "run")
    before = json.loads(storage.read("inputs.json"))["sets"]["train"]["store"]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("\n")  # another file, the same rows
    tokens = LocalStorage(f"{made.storage.uri}/tokens")
    tokens.delete(tokens.list(before))
    resolved(made, tmp_path / "run")
    pinned = read_inputs(storage)
    assert pinned
    assert pinned.sets["train"].store != before
    assert len(load_sets(made, pinned).train) == 40


def test_other_tokens_are_refused_with_the_file_that_changed(tmp_path: Path) -> None:
    made = config(tmp_path)
    resolved(made, tmp_path / "run")
    write_lines(tmp_path / "train.jsonl", [chat(("user", "red"), ("assistant", "blue"))])
    with pytest.raises(InputError, match=r"data\.train: .*train\.jsonl has changed since this run began; set data\.version"):
        resolved(made, tmp_path / "run")
