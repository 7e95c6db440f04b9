"""A name stands for its last run: what has changed since is said, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import config

from trainer.config import InputError, RunFile
from trainer.identity import compare_with_last, differences


def begun(folder: Path, **changes: Any) -> list[str]:
    """What is said when a run begins, which then leaves its first checkpoint."""
    run = RunFile(trainer=config(folder, **changes))
    said: list[str] = []
    compare_with_last(run, said.append)
    checkpoint = Path(run.uri, "checkpoints", "step-00000001.a0001", "manifest.json")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text("{}")
    return said


def test_other_settings_under_a_name_are_another_run_and_what_changed_is_said(tmp_path: Path) -> None:
    assert begun(tmp_path) == []
    first = config(tmp_path).fingerprint()
    [said] = begun(tmp_path, optim={"lr": 5e-4}, seed=3)
    assert said == f"another run than tiny-{first}, the last of this name: optim.lr 0.001 -> 0.0005, seed 0 -> 3"
    assert begun(tmp_path, optim={"lr": 5e-4}, seed=3, log_every_steps=9) == []
    assert begun(tmp_path) == []  # the first one goes on


def test_other_settings_are_refused_with_the_differences_where_that_is_asked_for(tmp_path: Path) -> None:
    assert begun(tmp_path, on_change="refuse") == []
    before = config(tmp_path).fingerprint()
    with pytest.raises(InputError) as refused:
        begun(tmp_path, on_change="refuse", schedule={"warmup_steps": 5}, model={"freeze": ["model.norm.*"]})
    assert str(refused.value) == (
        f"on_change: tiny-{before}, the last run of this name, had other settings "
        '(model.freeze [] -> ["model.norm.*"], schedule.warmup_steps 2 -> 5); '
        "set them back, choose another name, or set on_change to new_run"
    )
    assert begun(tmp_path, on_change="refuse", checkpoint={"every_steps": 7}) == []
    [folder] = (tmp_path / "runs").glob("tiny-*")
    (folder / "checkpoints/step-00000001.a0001/manifest.json").unlink()  # a run that is gone holds no name
    assert begun(tmp_path, on_change="refuse", seed=1) == []


def test_differences_name_what_came_and_what_went() -> None:
    old, new = {"a": {"b": 1, "gone": 2}, "list": [1]}, {"a": {"b": 1, "new": None}, "list": [1, 2], "text": "x" * 100}
    assert differences(old, new) == [
        "list [1] -> [1, 2]",
        f'text null -> "{"x" * 59}...',
        "a.gone 2 -> null",
    ]
    assert differences(new, json.loads(json.dumps(new))) == []
