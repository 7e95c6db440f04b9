"""Two drivers and one run: one trains, nothing is thrown away, and whoever wakes up late damages nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from servers import s3_config
from tiny import config, settings
from training import run_training, weights

import trainer.ownership as module
from trainer.config import InputError, Release, RunError, RunFile, StorageConfig
from trainer.driver import refuse_failed_twice, write_outcome
from trainer.ownership import Ownership
from trainer.storage import LocalStorage, Storage, open_storage

NEVER = threading.Event()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(module, "SILENCE_SECONDS", -29.0)  # a second, with the shortest grace period


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "disk":
        return LocalStorage(str(tmp_path / "run"))
    endpoint = request.getfixturevalue("s3_endpoint")
    return open_storage(f"s3://runs/{tmp_path.name}", StorageConfig(**s3_config(endpoint)))


def driver(storage: Storage, asked: Callable[[], None] = lambda: None, release: str | None = None, **changes: Any) -> Ownership:
    values = {"trainer": {"name": "a", "model": {"path": "m"}, "data": {"train": "t"}} | changes, "hardware": {"grace_seconds": 30}}
    run = RunFile.model_validate(values | ({"release": Release(name=release, namespace="n")} if release else {}))
    return Ownership(storage, run, asked)


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_newcomer_asks_the_holder_to_leave_and_takes_over_when_it_has(storage: Storage) -> None:
    asked = threading.Event()
    holder, newcomer = driver(storage, asked.set), driver(storage)
    assert holder.acquire(print, NEVER)
    waiting = threading.Thread(target=newcomer.acquire, args=(print, NEVER))
    waiting.start()
    assert asked.wait(20)
    time.sleep(1.5)  # longer than the silence that would cost a dead holder the run
    assert waiting.is_alive()
    assert holder.handed_over
    assert not holder.lost.is_set()
    holder.release()
    waiting.join(20)
    assert not waiting.is_alive()
    newcomer.release()
    third = driver(storage, asked.clear)
    assert third.acquire(print, NEVER)
    time.sleep(0.3)
    assert not third.handed_over  # a wish that was granted is gone
    third.release()


def test_of_many_that_start_at_once_one_holds_the_run_at_a_time(storage: Storage) -> None:
    holding, most = [0], [0]
    lock = threading.Lock()

    def work() -> None:
        leave = threading.Event()
        one = driver(storage, leave.set)
        assert one.acquire(lambda text: None, NEVER)
        with lock:
            holding[0] += 1
            most[0] = max(most[0], holding[0])
        leave.wait(0.3)
        with lock:
            holding[0] -= 1
        one.release()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most == [1]


def test_a_holder_that_fell_silent_loses_the_run_and_learns_of_it_when_it_wakes(storage: Storage) -> None:
    frozen = driver(storage)
    assert frozen.acquire(print, NEVER)
    frozen.leaving.set()  # stops its heart
    frozen.thread.join()
    newcomer = driver(storage)
    before = time.monotonic()
    frozen.record["host"] = "elsewhere"
    assert frozen._write(if_version=frozen.version)
    assert newcomer.acquire(print, NEVER)
    assert time.monotonic() - before > 1
    frozen.leaving.clear()
    frozen._beat()
    assert frozen.lost.is_set()
    with pytest.raises(RunError, match="another driver has taken this run over"):
        frozen.check()
    newcomer.check()
    newcomer.release()


def test_a_holder_whose_process_is_gone_from_this_machine_is_not_waited_for(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 1000.0)
    dead = driver(storage)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead.record["pid"] = gone.pid
    assert dead._write(if_absent=True)
    assert driver(storage).acquire(print, NEVER)


def test_another_release_is_refused_unless_it_says_takeover(storage: Storage) -> None:
    holder = driver(storage, release="blue")
    assert holder.acquire(print, NEVER)
    with pytest.raises(InputError, match="release blue holds this run; change name, or set takeover"):
        driver(storage, release="green").acquire(print, NEVER)
    assert not holder.handed_over
    newcomer = driver(storage, release="green", takeover=True)
    waiting = threading.Thread(target=newcomer.acquire, args=(print, NEVER))
    waiting.start()
    eventually(lambda: holder.handed_over)
    holder.release()
    waiting.join(20)
    assert not waiting.is_alive()
    newcomer.release()


def test_a_stop_while_waiting_for_the_holder_leaves_it_alone(storage: Storage) -> None:
    holder = driver(storage)
    assert holder.acquire(print, NEVER)
    stop = threading.Event()
    stop.set()
    assert not driver(storage).acquire(print, stop)
    holder.release()


def test_a_damaged_record_gives_way_when_nobody_rewrites_it(storage: Storage) -> None:
    storage.write("owner.json", b"{half")
    assert driver(storage, release="blue").acquire(print, NEVER)


def start(port: int, *arguments: str) -> subprocess.Popen[str]:
    """Python with these arguments as the one process of a torchrun, on one thread, as `run_processes` has it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = os.environ | alone | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-u", *arguments], env=environment, **pipes)


def test_a_second_driver_makes_the_first_save_and_goes_on_from_there(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 400}, checkpoint={"every_steps": 1000})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))

    command = ["-m", "trainer", "train", "--config", str(path)]
    first = start(29521, *command)
    assert first.stdout
    next(line for line in first.stdout if line.startswith("step   5/"))
    second = start(29522, *command)
    first_said, second_said = (process.communicate(timeout=240)[0] for process in (first, second))
    assert (first.returncode, second.returncode) == (75, 0), first_said + second_said
    assert "another driver holds this run: asking it to save and leave" in second_said
    [run] = (tmp_path / "runs").glob("tiny-*")
    steps = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert steps == list(range(1, 401))
    assert "step   1/400" not in second_said
    undisturbed = run_processes(1, run_training, values | {"storage": {"uri": str(tmp_path / "undisturbed")}})[0]
    ours, theirs = weights(str(run)), weights(undisturbed["uri"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_frozen_driver_that_wakes_up_after_another_took_over_changes_nothing(tmp_path: Path) -> None:
    values = settings(tmp_path, duration={"steps": 60}, checkpoint={"every_steps": 10})
    script = tmp_path / "drive.py"
    script.write_text(
        "import json, sys, trainer.ownership as o\n"
        "o.HEARTBEAT_SECONDS, o.ASK_SECONDS, o.SILENCE_SECONDS, o._is_dead = 0.2, 0.1, -27, lambda owner: False\n"
        "from trainer.config import RunFile\nfrom trainer.driver import drive\n"
        "run = RunFile.model_validate({'trainer': json.loads(sys.argv[1]), 'hardware': {'grace_seconds': 30}})\n"
        "sys.exit(drive(run))\n"
    )

    command = [str(script), json.dumps(values)]
    frozen = start(29523, *command)
    assert frozen.stdout
    next(line for line in frozen.stdout if line.startswith("step 15/"))
    frozen.send_signal(signal.SIGSTOP)
    newcomer = start(29524, *command)
    assert newcomer.wait(240) == 0
    [run] = (tmp_path / "runs").glob("tiny-*")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name[0] != "."}
    frozen.send_signal(signal.SIGCONT)
    said = frozen.communicate(timeout=120)[0]
    assert frozen.returncode == 1
    assert re.search("another driver has taken this run over|a newer attempt goes on with this run", said)
    kept = {path: path.read_bytes() for path in files}
    assert kept == files
    steps = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert steps == list(range(1, 61))


def test_a_release_that_failed_twice_in_the_same_way_is_not_started_a_third_time(tmp_path: Path) -> None:
    made = {"trainer": config(tmp_path), "release": {"name": "r", "namespace": "n"}}
    run = RunFile.model_validate(made)
    storage = LocalStorage(str(tmp_path / "run"))
    for _ in range(2):
        refuse_failed_twice(run, storage)
        write_outcome(run, storage, "failed", "no memory", 7)
    with pytest.raises(InputError, match=r"failed twice in the same way at step 7 \(no memory\)"):
        refuse_failed_twice(run, storage)
    refuse_failed_twice(RunFile.model_validate(made | {"hardware": {"workers": 2}}), storage)
    write_outcome(run, storage, "failed", "no memory", 9)  # it got further
    refuse_failed_twice(run, storage)
