"""What is measured on held-out rows: exactly their supervised tokens, each once, whatever the batch and the workers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from stores import build, data_config
from tiny import settings, write_rows
from training import run_training
from transformers import AutoModelForCausalLM

FIGURES = ("eval_loss", "eval_perplexity", "eval_accuracy")


def measured(values: dict[str, Any], size: int = 1) -> dict[str, Any]:
    """The evaluation before the first step."""
    return run_processes(size, run_training, values)[0]["rows"][0]


def by_hand(folder: Path, rows: Path) -> dict[str, float]:
    """The same figures from the model in transformers, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    _, tokens = build(data_config(rows))
    loss = right = count = 0.0
    for row in range(len(tokens)):
        ids, supervised = (torch.tensor(array.copy()) for array in tokens[row])
        with torch.no_grad():
            scores = model(ids.long().unsqueeze(0)).logits[0, :-1][supervised[1:]]
        labels = ids[1:][supervised[1:]].long()
        loss += torch.nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        right += (scores.argmax(-1) == labels).sum().item()
        count += len(labels)
    return {"eval_loss": loss / count, "eval_perplexity": math.exp(loss / count), "eval_accuracy": right / count}


def test_every_supervised_token_counts_once_whatever_the_batch_and_the_number_of_workers(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 1})
    expected = by_hand(tmp_path, tmp_path / "eval.jsonl")
    for size, micro_batch, length in ((1, 1, 128), (1, 4, 100), (2, 1, 128), (3, 2, 256)):
        changes = {"batch": {"sequences": 3, "micro_batch": micro_batch}, "data": values["data"] | {"sequence_length": length}}
        row = measured(values | changes | {"storage": {"uri": str(tmp_path / f"{size}-{micro_batch}")}}, size)
        assert {key: row[key] for key in FIGURES} == pytest.approx(expected, rel=1e-5)


def test_a_rows_weight_changes_what_is_learnt_and_not_what_is_measured(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 1}, storage={"uri": str(tmp_path / "plain")})
    plain = run_processes(1, run_training, values)[0]["rows"]
    for name in ("train", "eval"):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"weight": 1.0 + i % 3}) + "\n" for i, row in enumerate(rows)))
    weighted = run_processes(1, run_training, values | {"storage": {"uri": str(tmp_path / "weighted")}})[0]["rows"]
    assert weighted[0]["eval_loss"] == plain[0]["eval_loss"]
    assert weighted[1]["loss"] != pytest.approx(plain[1]["loss"], rel=1e-4)


def test_several_sets_are_measured_by_name_and_together(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 1})
    other = write_rows(tmp_path / "other.jsonl", 7, seed=5)
    values["data"]["eval"] = {"near": str(tmp_path / "eval.jsonl"), "far": [str(other)]}
    row = measured(values)
    near, far = by_hand(tmp_path, tmp_path / "eval.jsonl"), by_hand(tmp_path, other)
    assert row["eval_near_loss"] == pytest.approx(near["eval_loss"], rel=1e-5)
    assert row["eval_far_accuracy"] == pytest.approx(far["eval_accuracy"], rel=1e-5)
    assert min(near["eval_loss"], far["eval_loss"]) < row["eval_loss"] < max(near["eval_loss"], far["eval_loss"])


def test_a_fraction_of_the_rows_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"epochs": 1, "steps": None}, evaluate={"prompts": 2, "max_new_tokens": 2})
    del values["data"]["eval"]
    values["data"]["eval_fraction"] = 0.25
    [result] = run_processes(1, run_training, values)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    asked = [sample["messages"] for sample in result["rows"][0]["samples"]]
    assert len(asked) == 2
    assert all(any(row["messages"][: len(messages)] == messages for row in rows) for messages in asked)
    assert math.isfinite(result["rows"][-1]["eval_loss"])


def test_training_rows_that_are_all_alike_leave_nothing_to_hold_out(tmp_path: Path) -> None:
    values = settings(tmp_path)
    line = (tmp_path / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 5)
    del values["data"]["eval"]
    values["data"]["eval_fraction"] = 0.5
    with pytest.raises(AssertionError, match=r"data\.eval_fraction: the training rows are all alike"):
        run_processes(1, run_training, values)
