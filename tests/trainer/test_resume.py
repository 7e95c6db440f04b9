"""A run that was stopped goes on as if it had not been."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from safetensors.torch import load_file
from tiny import settings
from training import run_training, weights


def losses(results: list[dict[str, Any]]) -> dict[int, float]:
    """Loss by step over several attempts; a step that was logged twice must have had the same loss."""
    found: dict[int, float] = {}
    for result in results:
        for row in result["rows"]:
            if "loss" in row:
                assert found.setdefault(row["step"], row["loss"]) == row["loss"]
    return found


def shared_settings(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return settings(folder, storage={"uri": str(folder / name)}, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    return run_processes(2, run_training, shared_settings(folder, "whole"))[0]


def test_interrupted_twice_and_resumed_ends_in_bitwise_equal_weights(folder: Path, whole: dict[str, Any]) -> None:
    values = shared_settings(folder, "twice", checkpoint={"every_steps": 100})
    parts = [run_processes(2, run_training, values, stop)[0] for stop in (1, 4, None)]
    assert [part["ending"] for part in parts] == ["interrupted", "interrupted", "complete"]
    assert losses(parts) == losses([whole])
    kept, again = weights(whole["uri"]), weights(parts[0]["uri"])
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_moments_in_bfloat16_are_saved_as_such_and_resumed_to_bitwise_equal_weights(folder: Path, whole: dict[str, Any]) -> None:
    kinds = {"moments": {}, "moments-parts": {"checkpoint": {"every_steps": 100}}}
    run, parts = (shared_settings(folder, name, optim={"moments": "bfloat16"}, **changes) for name, changes in kinds.items())
    [once] = run_processes(2, run_training, run)[:1]
    again = [run_processes(2, run_training, parts, stop)[0] for stop in (3, None)]
    assert losses(again) == losses([once])
    kept, resumed, other = (weights(result["uri"]) for result in (once, again[-1], whole))
    assert all(torch.equal(kept[name], resumed[name]) for name in kept)
    assert not all(torch.equal(kept[name], other[name]) for name in kept)
    [file, *_] = Path(once["uri"], "checkpoints").glob("*/rank-00000.safetensors")
    types = {name.rpartition(".")[2]: tensor.dtype for name, tensor in load_file(file).items() if name.startswith("optimizer.")}
    assert types == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_another_number_of_workers_resumes_with_the_same_losses(folder: Path, whole: dict[str, Any]) -> None:
    values = shared_settings(folder, "elastic")
    parts = [run_processes(size, run_training, values, stop)[0] for size, stop in ((2, 1), (3, 4), (1, None))]
    assert parts[-1]["ending"] == "complete"
    kept = losses([whole])
    assert losses(parts) == pytest.approx(kept, rel=1e-4)
    assert sorted(kept) == list(range(1, 9))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(folder: Path, whole: dict[str, Any]) -> None:
    values = shared_settings(folder, "damaged")
    first = run_processes(2, run_training, values, 3)[0]
    checkpoints = sorted(Path(first["uri"], "checkpoints").iterdir())
    assert [path.name[:13] for path in checkpoints] == ["step-00000004", "step-00000005"]
    shard = checkpoints[-1] / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    second = run_processes(2, run_training, values)[0]
    assert [row["step"] for row in second["rows"] if "loss" in row] == [5, 6, 7, 8]
    assert losses([first, second]) == losses([whole])


@pytest.mark.parametrize("leftover", ["no manifest", "half a manifest", "truncated shard", "missing shard", "damaged header"])
def test_a_half_written_checkpoint_does_not_exist(folder: Path, whole: dict[str, Any], leftover: str) -> None:
    values = shared_settings(folder, leftover.replace(" ", "-"))
    first = run_processes(1, run_training, values, 3)[0]
    newest = sorted(Path(first["uri"], "checkpoints").iterdir())[-1]
    assert newest.name == "step-00000005.a0001"
    manifest, shard = newest / "manifest.json", newest / "rank-00000.safetensors"
    match leftover:
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size // 2])
        case "truncated shard":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "damaged header":
            shard.write_bytes(bytes(64) + shard.read_bytes()[64:])
        case "missing shard":
            shard.unlink()
    second = run_processes(1, run_training, values)[0]
    assert [row["step"] for row in second["rows"] if "loss" in row] == [5, 6, 7, 8]
    assert second["ending"] == "complete"


def test_retention_keeps_the_newest_complete_checkpoints(whole: dict[str, Any]) -> None:
    names = sorted(path.name for path in Path(whole["uri"], "checkpoints").iterdir())
    assert names == ["step-00000006.a0001", "step-00000008.a0001"]


def test_metrics_are_one_row_a_step_through_interruptions(folder: Path, whole: dict[str, Any]) -> None:
    for name in ("whole", "twice", "elastic", "damaged"):
        uri = next((folder / name).glob("tiny-*"))
        rows = [json.loads(line) for line in (uri / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9)), name
        assert [row["step"] for row in rows if "eval_loss" in row] == [0, 8], name


def test_a_store_that_cannot_be_read_ends_the_run_rather_than_starting_it_again(folder: Path, whole: dict[str, Any]) -> None:
    values = shared_settings(folder, "unreadable")
    first = run_processes(1, run_training, values, 3)[0]
    with pytest.raises(AssertionError, match="No space left on device"):
        run_processes(1, with_a_full_disk, values)
    second = run_processes(1, run_training, values)[0]
    assert [row["step"] for row in second["rows"] if "loss" in row] == [6, 7, 8]
    assert first["ending"] == "interrupted"


def with_a_full_disk(values: dict[str, Any]) -> None:
    from trainer.storage import LocalStorage

    def refuse(self: Any, key: str) -> Any:
        raise OSError("No space left on device")

    LocalStorage.local_copy = refuse
    run_training(values)


def test_a_gradient_that_is_no_number_reaches_neither_weights_nor_a_checkpoint(folder: Path, whole: dict[str, Any]) -> None:
    values = shared_settings(folder, "nan")
    with pytest.raises(AssertionError, match="the gradient norm of step 4 is nan"):
        run_processes(2, with_a_bad_gradient, values, 4)
    again = run_processes(2, run_training, values)[0]
    assert [row["step"] for row in again["rows"] if "loss" in row] == [3, 4, 5, 6, 7, 8]
    assert losses([again]) == {step: loss for step, loss in losses([whole]).items() if step > 2}


def with_a_bad_gradient(values: dict[str, Any], at: int, stop_at: int | None = None) -> dict[str, Any]:
    """A run in which one rank's gradient is no number when the loop has come to its `at`-th step."""
    import trainer.train as module

    measure, calls = module.gradient_norm, []

    def spoil(model: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == at and dist.get_rank() == 1:
            next(model.parameters()).grad.to_local().fill_(float("nan"))
        return measure(model)

    module.gradient_norm = spoil
    return run_training(values, stop_at)


def test_a_step_without_a_number_is_left_out_by_all_ranks_alike_up_to_a_ceiling_that_a_resume_knows(folder: Path) -> None:
    changes = {"optim": {"lr": 1e-3, "max_skipped_steps": 1}, "checkpoint": {"every_steps": 100}}
    values = shared_settings(folder, "skip", **changes)
    skipped = run_processes(2, with_a_bad_gradient, values, 4)[0]
    assert skipped["ending"] == "complete"
    assert [row["step"] for row in skipped["rows"] if "loss" in row] == [1, 2, 3, 5, 6, 7, 8]
    assert [row for row in skipped["rows"] if "skipped_steps" in row] == [{"step": 4, "num_steps": 8, "skipped_steps": 1}]

    parts = shared_settings(folder, "skip-parts", **changes)
    first = run_processes(2, with_a_bad_gradient, parts, 4, 5)[0]
    assert first["ending"] == "interrupted"
    with pytest.raises(AssertionError, match="the gradient norm of step 8 is nan"):
        run_processes(2, with_a_bad_gradient, parts, 1)
    rest = run_processes(2, run_training, parts)[0]
    assert losses([first, rest]) == losses([skipped])
    whole, resumed = weights(skipped["uri"]), weights(rest["uri"])
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(tensor.isfinite().all() for tensor in whole.values())
