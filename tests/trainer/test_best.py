"""The best evaluation: which it is, when training ends for want of a better one, and whose weights are exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from safetensors.torch import load_file
from tiny import config, settings
from training import run_training, weights

from trainer.best import Best
from trainer.config import BestConfig, InputError, TrainerConfig, parse_settings


def decide(values: list[float], **changes: Any) -> tuple[int | None, int | None]:
    """The best step of evaluations at 10, 20, ..., and the step at which they end the run."""
    best = Best(BestConfig(**changes), {})
    key = changes.get("metric", "eval_loss")
    for step, value in enumerate(values, start=1):
        best.note({"step": 10 * step, key: value})
        best = Best(BestConfig(**changes), json.loads(json.dumps(best.state)))  # as after a resume
        best.note({"step": 10 * step, key: value})  # which measures the same step again
        if best.ends:
            return best.step, 10 * step
    return best.step, None


def test_the_lowest_loss_or_the_highest_accuracy_is_the_best() -> None:
    assert decide([3.0, 2.0, 2.5, 2.2]) == (20, None)
    assert decide([0.1, 0.3, 0.2], metric="eval_accuracy") == (20, None)
    assert decide([2.0, 2.0]) == (10, None)


def test_patience_counts_evaluations_in_a_row_that_are_not_better_by_min_delta() -> None:
    assert decide([3.0, 2.0, 2.5, 2.2, 2.1], patience=2) == (20, 40)
    assert decide([3.0, 3.1, 2.0, 2.1, 1.9], patience=2) == (50, None)
    assert decide([3.0, 2.95, 2.91, 2.8], patience=2, min_delta=0.1) == (10, 30)
    assert decide([0.5, 0.54, 0.58], metric="eval_accuracy", patience=2, min_delta=0.05) == (30, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"best": {}}, "best needs evaluations to choose from; set evaluate.every_steps"),
        ({"best": {}, "evaluate": {"every_steps": 5}}, "best needs held-out rows; set data.eval or data.eval_fraction"),
        (
            {
                "best": {"metric": "eval_code_loss"},
                "evaluate": {"every_steps": 5},
                "data": {"train": "t", "eval": {"a": "x", "b": "y"}},
            },
            "best.metric: eval_code_loss is not measured; write one of eval_loss, eval_a_loss, eval_b_loss,",
        ),
        ({"best": {"metric": "loss"}}, "best.metric: 'loss' is not allowed; Figure of the held-out rows"),
    ],
)
def test_a_best_that_is_never_measured_is_refused(changes: dict[str, Any], sentence: str) -> None:
    values: dict[str, Any] = {"name": "demo", "model": {"path": "m"}, "data": {"train": "t"}}
    with pytest.raises(InputError, match=sentence.replace(".", r"\.").replace("(", r"\(")):
        parse_settings(TrainerConfig, values | changes, "file.json")


def test_what_evaluations_decide_is_part_of_the_fingerprint_and_what_they_only_keep_is_not(tmp_path: Path) -> None:
    def fingerprint(best: dict[str, Any] | None, every_steps: int = 2) -> str:
        return config(tmp_path, best=best, evaluate={"every_steps": every_steps}).fingerprint()

    plain, patient = fingerprint(None), fingerprint({"patience": 2})
    assert fingerprint({}) == fingerprint({"metric": "eval_accuracy"}) == plain
    assert fingerprint({"patience": 2}, every_steps=4) != patient != plain
    assert fingerprint({"export": True}) not in (plain, patient)


def overfitting(folder: Path, name: str, **best: Any) -> dict[str, Any]:
    """Settings of a run that learns few rows by heart, so that the held-out loss falls and then rises."""
    values = settings(folder, storage={"uri": str(folder / name)}, duration={"steps": 40}, optim={"lr": 0.02})
    values["data"]["train"] = str(folder / "few.jsonl")
    (folder / "few.jsonl").write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:4]))
    return values | {
        "schedule": {"name": "constant"},
        "checkpoint": {"every_steps": 100, "keep_last": 1},
        "evaluate": {"every_steps": 2, "prompts": 1, "max_new_tokens": 4},
        "best": best,
    }


def rows(uri: str, key: str) -> list[dict[str, Any]]:
    found = map(json.loads, Path(uri, "metrics.jsonl").read_text().splitlines())
    return [row for row in found if key in row]


def test_training_ends_early_and_the_best_weights_are_exported_also_through_interruptions(tmp_path: Path) -> None:
    values = overfitting(tmp_path, "whole", patience=3, export=True)
    whole = run_processes(2, run_training, values)[0]
    uri = whole["uri"]
    evaluated = {row["step"]: row["eval_loss"] for row in rows(uri, "eval_loss") if row["step"]}
    best = min(evaluated, key=lambda step: evaluated[step])
    last = rows(uri, "loss")[-1]["step"]
    assert last == best + 6 < 40  # three evaluations, two steps apart
    assert whole["ending"] == "complete"
    [chosen] = rows(uri, "exported_step")
    assert (chosen["step"], chosen["exported_step"]) == (last, best)
    assert chosen["best"] == {"metric": "eval_loss", "step": best, "value": evaluated[best]}
    kept = sorted(int(path.name[5:13]) for path in Path(uri, "checkpoints").iterdir())
    assert kept == [best, last]
    [folder] = Path(uri, "checkpoints").glob(f"step-{best:08d}.*")
    saved = [load_file(folder / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    exported = weights(uri)
    assert all(torch.equal(torch.cat([part[f"model.{name}"] for part in saved]), tensor) for name, tensor in exported.items())

    again = values | {"storage": {"uri": str(tmp_path / "parts")}}
    parts = [run_processes(2, run_training, again, stop)[0] for stop in (2, last - 3, None)]
    assert [part["ending"] for part in parts] == ["interrupted", "interrupted", "complete"]
    assert parts[0]["rows"][-1]["step"] == 4  # where an evaluation was due, which the next part has made up for
    theirs = weights(parts[0]["uri"])
    assert all(torch.equal(theirs[name], tensor) for name, tensor in exported.items())
    assert {row["step"]: row["eval_loss"] for row in rows(parts[0]["uri"], "eval_loss") if row["step"]} == evaluated


def test_a_best_checkpoint_that_is_lost_gives_way_to_the_last_one(tmp_path: Path) -> None:
    values = overfitting(tmp_path, "lost", export=True)
    whole = run_processes(1, run_without_its_best, values)[0]
    [chosen] = rows(whole["uri"], "exported_step")
    assert chosen["exported_step"] == 40 != chosen["best"]["step"]


def run_without_its_best(values: dict[str, Any]) -> dict[str, Any]:
    from trainer.checkpoint import Checkpoints

    load = Checkpoints.load

    def damaged(self: Any, step: int) -> bool:
        for path in Path(self.storage.uri, "checkpoints").glob(f"step-{step:08d}.*/*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        return load(self, step)

    Checkpoints.load = damaged
    return run_training(values)
