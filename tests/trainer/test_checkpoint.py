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


def with_a_death_in_an_upload(values: dict[str, Any], victim: int, folder: str) -> None:
    """A run in which one rank dies in its second upload; the others write down for how many seconds they outlive it."""
    import os
    import time

    from trainer.checkpoint import Checkpoints

    upload, death = Checkpoints._upload, Path(folder, "death")

    def die(self: Any, key: str, pieces: Any) -> Any:
        if "step-00000004" in key and self.world.rank == victim:
            time.sleep(1)  # the others have stored theirs
            death.touch()
            os._exit(9)
        return upload(self, key, pieces)

    Checkpoints._upload = die
    try:
        run_training(values)
    finally:
        Path(folder, f"outlived-{os.environ['RANK']}").write_text(str(time.time() - death.stat().st_mtime))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_in_its_upload_is_waited_for_by_nobody(tmp_path: Path, victim: int) -> None:
    values = settings(tmp_path)
    with pytest.raises(AssertionError, match=r"Connection (closed|reset) by peer|exit code 9"):
        run_processes(3, with_a_death_in_an_upload, values, victim, str(tmp_path))
    seconds = [float(path.read_text()) for path in tmp_path.glob("outlived-*")]
    assert len(seconds) == 2
    assert max(seconds) < 60  # one, on an idle machine
    [uri] = (tmp_path / "runs").glob("tiny-*")
    assert {step for step, complete in checkpoints(str(uri)).items() if complete} == {2}
    [again, _] = run_processes(2, run_training, values)
    assert [row["step"] for row in again["rows"] if "loss" in row] == [3, 4, 5, 6, 7, 8]


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


def with_warnings(values: dict[str, Any]) -> tuple[int, list[str]]:
    """The step that a new attempt goes on from, and what it warns of."""
    import contextlib
    import io

    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig
    from trainer.parallel import Wish, join_world
    from trainer.storage import LocalStorage

    layer = torch.nn.Linear(4, 4)
    storage = LocalStorage(f"{values['storage']['uri']}/warned")
    with join_world(lambda: Wish.NOTHING) as world, contextlib.redirect_stdout(io.StringIO()) as said:
        first = Checkpoints(storage, CheckpointConfig(keep_last=9), world, layer, torch.optim.AdamW(layer.parameters()))
        for step in (1, 2, 3):
            first.save(step)
        first.finish()
        damage_newest(Path(storage.uri, "checkpoints", "step-00000003.a0001"), values["damage"])
        again = Checkpoints(storage, CheckpointConfig(keep_last=9), world, layer, torch.optim.AdamW(layer.parameters()))
        return again.restore(), [line for line in said.getvalue().splitlines() if line.startswith("warning: ")]


def damage_newest(folder: Path, kind: str) -> None:
    shard, manifest = folder / "rank-00000.safetensors", folder / "manifest.json"
    text, data = manifest.read_text(), bytearray(shard.read_bytes())
    match kind:
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(text[: len(text) // 2])
        case "another number in the manifest":
            manifest.write_text(text.replace('"resumed_from": 0', '"resumed_from": 1'))
        case "missing":
            shard.unlink()
        case "truncated":
            shard.write_bytes(data[:-1])
        case "a flipped bit":
            data[-5] ^= 4
            shard.write_bytes(data)
        case "extra":
            (folder / "rank-00001.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "step", "warning"),
    [
        ("nothing", 3, ""),
        ("no manifest", 2, "is passed over: it has no manifest, so its save did not end"),
        ("half a manifest", 2, "is passed over: its manifest is damaged"),
        ("another number in the manifest", 2, "is passed over: its manifest is damaged"),
        ("missing", 2, "is passed over: rank-00000.safetensors is missing"),
        ("truncated", 2, "is passed over: rank-00000.safetensors has"),
        ("a flipped bit", 2, "is passed over: rank-00000.safetensors does not have the checksum of the manifest"),
        ("extra", 3, "holds files that its manifest does not name, which are not read: rank-00001.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, kind: str, step: int, warning: str) -> None:
    values = {"storage": {"uri": str(tmp_path)}, "damage": kind}
    [(resumed, warnings)] = run_processes(1, with_warnings, values)
    assert resumed == step
    assert len(warnings) == bool(warning)
    assert all(warning in text for text in warnings)


def with_a_small_disk(values: dict[str, Any]) -> tuple[str, list[str], int]:
    """Saves on a disk that fills up: why it ends, what is left, and where a new attempt goes on once there is room."""
    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig, RunError
    from trainer.parallel import Wish, join_world
    from trainer.storage import LocalStorage

    layer = torch.nn.Linear(512, 512)  # 1 MiB, and no moments
    optimizer = torch.optim.SGD(layer.parameters())
    storage, ballast = LocalStorage(values["disk"] + "/run"), Path(values["disk"], "ballast")
    reason, step = "", 0
    with join_world(lambda: Wish.NOTHING) as world:
        checkpoints = Checkpoints(storage, CheckpointConfig(keep_last=1), world, layer, optimizer)
        checkpoints.save(1)
        ballast.write_bytes(bytes(int(2.5 * 2**20)))  # of 4 MiB, so that there is no room for a second one
        try:
            for step in range(2, 9):
                checkpoints.save(step)
        except RunError as error:
            reason = f"{step}: {error}"
        left = sorted(str(path.relative_to(storage.root)) for path in storage.root.rglob("*") if path.is_file())
        ballast.unlink()
        again = Checkpoints(storage, CheckpointConfig(keep_last=1), world, layer, optimizer)
        resumed = again.restore()
        again.save(9)
        again.finish()
        return reason, left, resumed


def test_a_full_disk_ends_the_run_with_that_reason_and_the_last_checkpoint_whole(small_disk: Path) -> None:
    [(reason, left, resumed)] = run_processes(1, with_a_small_disk, {"disk": str(small_disk)})
    told = "6: 4 checkpoints in a row could not be stored: [Errno 28] No space left on device"
    assert reason == f"{told}: '{small_disk}/run/checkpoints/step-00000005.a0001/rank-00000.safetensors'"
    folder = "checkpoints/step-00000001.a0001"
    assert left == ["attempts/0001", f"{folder}/manifest.json", f"{folder}/rank-00000.safetensors"]
    assert resumed == 1


def with_buffers_counted(values: dict[str, Any]) -> tuple[set[int], float]:
    """Addresses of the buffers that slow saves are staged in, and the seconds that the loop was held up by them."""
    import time

    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig
    from trainer.parallel import Wish, World, join_world
    from trainer.storage import LocalStorage

    World.runs_ahead = property(lambda self: True)  # type: ignore[assignment]  # as on a GPU
    upload, used = Checkpoints._upload, []

    def slow(self: Any, key: str, pieces: Any) -> Any:
        used.append(torch.frombuffer(pieces[0], dtype=torch.uint8))  # kept, so that another one has another address
        time.sleep(0.5)
        return upload(self, key, pieces)

    Checkpoints._upload = slow
    layer = torch.nn.Linear(64, 64)
    with join_world(lambda: Wish.NOTHING) as world:
        made = Checkpoints(LocalStorage(values["uri"]), CheckpointConfig(), world, layer, torch.optim.AdamW(layer.parameters()))
        began = time.monotonic()
        for step in range(1, 5):
            made.save(step)
        return {buffer.data_ptr() for buffer in used}, time.monotonic() - began


def test_saves_that_outlast_their_interval_hold_the_loop_up_and_need_memory_for_one(tmp_path: Path) -> None:
    [(buffers, seconds)] = run_processes(1, with_buffers_counted, {"uri": str(tmp_path)})
    assert len(buffers) == 1
    assert seconds > 1.5
