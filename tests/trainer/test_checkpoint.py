"""Saving behind the loop: what it waits for, what happens when an upload fails, and what a reader may trust."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from safetensors import safe_open
from tiny import settings
from training import run_training


def checkpoints(uri: str) -> dict[int, bool]:
    """Whether each step's checkpoint, of those that left something behind, has a manifest."""
    folders = Path(uri, "checkpoints").iterdir()
    return {int(folder.name[5:13]): (folder / "manifest.json").exists() for folder in folders}


def with_slow_uploads(values: dict[str, Any]) -> list[tuple[str, int]]:
    """The order of what happens: steps that are taken, and checkpoints that are stored half a second after they were staged."""
    import time

    import trainer.train as module
    from trainer.checkpoint import Checkpoints
    from trainer.parallel import World

    events: list[tuple[str, int]] = []
    upload, train_step = Checkpoints._upload, module.train_step

    def slow(self: Any, key: str, pieces: Any) -> Any:
        time.sleep(0.5)
        events.append(("stored", int(key.split("step-")[1][:8])))
        return upload(self, key, pieces)

    def step(*arguments: Any) -> Any:
        events.append(("step", 1 + sum(kind == "step" for kind, _ in events)))
        return train_step(*arguments)

    Checkpoints._upload, module.train_step = slow, step
    World.runs_ahead = property(lambda self: True)  # type: ignore[assignment]  # as on a GPU
    run_training(values)
    return events


def test_the_loop_goes_on_while_a_checkpoint_is_stored_and_waits_for_it_before_the_next(tmp_path: Path) -> None:
    values = settings(tmp_path, checkpoint={"every_steps": 3})
    [events] = run_processes(1, with_slow_uploads, values)
    assert [number for kind, number in events if kind == "stored"] == [3, 6, 8]
    assert events.index(("step", 4)) < events.index(("stored", 3)) < events.index(("step", 7))
    assert ("stored", 6) in events[: events.index(("stored", 8))]


def with_failing_uploads(values: dict[str, Any], failing: dict[int, list[int]]) -> Any:
    """A run in which rank `r`'s upload of each step in failing[r] is refused by the store."""
    import torch.distributed as dist

    from trainer.checkpoint import Checkpoints

    upload = Checkpoints._upload

    def refuse(self: Any, key: str, pieces: Any) -> Any:
        if int(key.split("step-")[1][:8]) in failing.get(dist.get_rank(), []):
            raise OSError("SlowDown: reduce your request rate")
        return upload(self, key, pieces)

    Checkpoints._upload = refuse
    return run_training(values)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_is_no_checkpoint_and_does_not_end_the_run(tmp_path: Path, rank: int) -> None:
    values = settings(tmp_path, checkpoint={"every_steps": 2, "keep_last": 9})
    [result, _] = run_processes(2, with_failing_uploads, values, {rank: [4]})
    assert result["ending"] == "complete"
    assert {step for step, complete in checkpoints(result["uri"]).items() if complete} == {2, 6, 8}


def test_too_many_failures_in_a_row_end_the_run_and_one_success_between_forgets_them(tmp_path: Path) -> None:
    values = settings(tmp_path, checkpoint={"every_steps": 1})
    with pytest.raises(AssertionError, match="4 checkpoints in a row could not be stored: SlowDown"):
        run_processes(2, with_failing_uploads, values, {1: [1, 2, 3, 4]})
    other = settings(tmp_path, checkpoint={"every_steps": 1}, storage={"uri": str(tmp_path / "other")})
    [result, _] = run_processes(2, with_failing_uploads, other, {0: [1, 2, 3], 1: [5, 6, 7]})
    assert result["ending"] == "complete"


def test_the_last_checkpoint_may_not_fail(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the last checkpoint could not be stored: SlowDown"):
        run_processes(2, with_failing_uploads, settings(tmp_path), {1: [8]})


def test_a_ranks_file_is_plain_safetensors_with_its_rows_of_every_tensor(tmp_path: Path) -> None:
    [result, _] = run_processes(2, run_training, settings(tmp_path, checkpoint={"keep_last": 1}))
    [folder] = Path(result["uri"], "checkpoints").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 8
    whole: dict[str, list[torch.Tensor]] = {}
    for name, facts in manifest["files"].items():
        with safe_open(folder / name, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (it is no dict)
                assert facts["rows"][key] == [sum(map(len, whole.get(key, []))), len(weights.get_tensor(key))]
                whole.setdefault(key, []).append(weights.get_tensor(key))
    exported = safe_open(Path(result["uri"], "model", "model.safetensors"), framework="pt")
    for key in exported.keys():  # noqa: SIM118
        assert torch.equal(torch.cat(whole[f"model.{key}"]), exported.get_tensor(key)), key
        assert torch.cat(whole[f"optimizer.{key}.exp_avg"]).shape == exported.get_tensor(key).shape


def with_a_zombie(values: dict[str, Any]) -> str:
    """Starts an attempt, then another one beside it, and lets the first save as if it had woken up."""
    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig, RunError
    from trainer.parallel import Wish, join_world
    from trainer.storage import LocalStorage

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    storage = LocalStorage(f"{values['storage']['uri']}/zombie")
    with join_world(lambda: Wish.NOTHING) as world:
        zombie = Checkpoints(storage, CheckpointConfig(keep_last=1), world, layer, optimizer)
        newer = Checkpoints(storage, CheckpointConfig(keep_last=1), world, layer, optimizer)
        newer.save(5)
        newer.finish()
        zombie.save(9)
        with pytest.raises(RunError, match="a newer attempt goes on with this run"):
            zombie.finish()
        again = Checkpoints(storage, CheckpointConfig(keep_last=1), world, layer, optimizer)
        return str(again.restore())


def test_what_an_attempt_saves_that_woke_up_late_is_never_resumed_from(tmp_path: Path) -> None:
    assert run_processes(1, with_a_zombie, settings(tmp_path)) == ["5"]


def test_the_newest_checkpoints_are_kept_and_every_so_many_steps_for_good(tmp_path: Path) -> None:
    kept = {"every_steps": 1, "keep_last": 2, "keep_every_steps": 3}
    [result] = run_processes(1, run_training, settings(tmp_path, checkpoint=kept))
    assert checkpoints(result["uri"]) == dict.fromkeys((3, 6, 7, 8), True)
