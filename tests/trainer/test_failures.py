"""What dies or hangs under a real Ray Train run: the others stop, all start again, and no step is lost or seen twice."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import run_processes
from test_driver import ALONE, ENVIRONMENT, OFFLINE, start, write_config
from tiny import config, settings
from training import run_training, weights

from trainer.config import RunError, RunFile
from trainer.driver import train_or_advise


def workers(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """Ray Train's worker processes of a run, oldest first."""
    found = [process for process in psutil.Process(driver.pid).children(recursive=True) if "RayTrainWorker" in process.name()]
    return found or [process for process in psutil.process_iter() if _is_worker_of(process, driver.pid)]


def _is_worker_of(process: psutil.Process, pid: int) -> bool:
    try:
        return "RayTrainWorker" in " ".join(process.cmdline()) and process.environ().get("DRIVER_OF_TEST") == str(os.getpid())
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_worker_that_dies_or_hangs_costs_no_more_than_the_steps_since_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("DRIVER_OF_TEST", str(os.getpid()))
    monkeypatch.setenv("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "15")
    changes: dict[str, Any] = {"duration": {"steps": 120}, "checkpoint": {"every_steps": 10}, "hang_seconds": 15}
    path = write_config(tmp_path, **changes)
    run = start(path)
    assert run.stdout
    lines, struck = [], False
    for line in run.stdout:
        lines.append(line)
        if not struck and line.startswith("step  25/"):
            struck = True
            workers(run)[-1].send_signal(number)
    output = "".join(lines)
    assert run.wait(300) == 0, output
    shown = [int(step) for step in re.findall(r"^step +(\d+)/120", output, re.MULTILINE)]
    assert all(b == a + 1 or b % 10 == 1 for a, b in itertools.pairwise(shown)), shown  # on, or again after a checkpoint
    [folder] = (tmp_path / "runs").glob("tiny-*")
    assert len(list((folder / "attempts").iterdir())) == 2
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, 121))
    alone = settings(tmp_path, storage={"uri": str(tmp_path / "alone")}, **changes)
    ours, theirs = weights(str(folder)), weights(run_processes(2, run_training, alone)[0]["uri"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# In each attempt, worker 1 raises in its fifth step, while worker 0 waits for it: at first what a retry may mend, then what none does.
DRIVER = """
import sys, threading, trainer.ray_train as module
from pathlib import Path
from trainer.config import RunFile, load_settings
from trainer.driver import drive

work = module.work

def failing_work(payload, folder=Path(sys.argv[1]).parent):
    import os, time, trainer.train
    from trainer.config import RunError
    train_step, taken = trainer.train.train_step, []

    def step(*arguments):
        taken.append(1)
        world = arguments[-1]
        if len(taken) == 5:
            (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        if len(taken) == 5 and world.rank == 1:
            time.sleep(1)
            again = (folder / "raised-1").exists()
            (folder / ("raised-2" if again else "raised-1")).touch()
            raise RunError("planted for good") if again else RuntimeError("planted")
        return train_step(*arguments)

    trainer.train.train_step = step
    work(payload)

def shutdown(folder=Path(sys.argv[1]).parent, shutdown=module.ray.shutdown):
    (folder / "threads").write_text(" ".join(thread.name for thread in threading.enumerate()))
    shutdown()

module.work = failing_work
module.ray.shutdown = shutdown
sys.exit(drive(load_settings(RunFile, Path(sys.argv[1]))))
"""


def test_when_one_worker_raises_the_others_stop_within_seconds_and_its_cause_is_the_one_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps({"trainer": settings(tmp_path, duration={"steps": 500}), "hardware": {"workers": 2}})
    )
    (tmp_path / "drive.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "drive.py"), str(tmp_path / "run.json")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    try:
        eventually(lambda: (tmp_path / "raised-1").exists(), 300)
        waiting = int((tmp_path / "pid-0").read_text())
        stopped = eventually(lambda: not psutil.pid_exists(waiting), 60)
        eventually(lambda: (tmp_path / "raised-2").exists(), 300)
        began = time.monotonic()
        output, _ = driver.communicate(timeout=120)
        ended = time.monotonic() - began
    finally:
        driver.kill()
    print(f"a worker that waited was stopped {stopped:.1f} s after another had raised, the driver had ended {ended:.1f} s after")
    assert stopped < 15
    assert ended < 25
    assert driver.returncode == 1
    assert output.splitlines()[-1].endswith("planted for good")
    # Whoever asks Ray anything once it is shut down ends the process there and then, whatever it has still to write.
    assert "trainer.fit" not in (tmp_path / "threads").read_text()
    [folder] = (tmp_path / "runs").glob("tiny-*")
    assert json.loads((folder / "outcome.json").read_text())["cause"] == "planted for good"
    assert len(list((folder / "attempts").iterdir())) == 2


def eventually(true: Callable[[], bool], seconds: float) -> float:
    """Waits for it; returns the seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)
    return time.monotonic() - began


def test_of_several_failures_the_first_is_told_and_a_worker_that_died_comes_before_those_who_missed_it() -> None:
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
    from ray.train.v2.api.exceptions import WorkerGroupError

    from trainer.control import Control
    from trainer.ray_train import first_cause

    control = Control()
    control.failed("RuntimeError on worker 2: out of range")
    control.failed("RuntimeError on worker 0: Connection closed by peer")
    raised: dict[int, Exception] = {rank: RuntimeError("Connection closed by peer") for rank in (0, 2)}
    assert first_cause(control.news(False), [WorkerGroupError("", raised)]) == "RuntimeError on worker 2: out of range"
    killed = raised | {1: WorkerHealthCheckFailedError("it was killed\nby signal 9", RuntimeError())}
    assert first_cause(control.news(False), [WorkerGroupError("", killed)]).startswith("worker 1 died: it was killed by signal 9")
    control.add({"step": 1})  # a step after it: that was mended
    assert first_cause(control.news(False), [RuntimeError("no places")]) == "no places"


def test_a_gpu_that_is_too_small_is_a_sentence_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.train as module

    def too_much(*_arguments: Any) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    class World:
        rank = 3

    monkeypatch.setattr(module, "train", too_much)
    run = RunFile(trainer=config(tmp_path))
    with pytest.raises(RunError) as ended:
        train_or_advise(run, World(), print)
    assert str(ended.value) == (
        "the memory of worker 3's GPU is too small (CUDA out of memory); "
        "set batch.micro_batch to 1, lower data.sequence_length, or take more workers"
    )


@pytest.mark.parametrize("what", ["the run's folder", "the temporary folder"])
def test_a_disk_that_fills_up_ends_the_run_with_one_sentence_and_with_room_it_goes_on(
    tmp_path: Path, small_disk: Path, what: str
) -> None:
    changes: dict[str, Any] = {"duration": {"steps": 60}, "checkpoint": {"every_steps": 10}}
    if what == "the run's folder":
        changes["storage"] = {"uri": str(small_disk / "runs")}
    path = write_config(tmp_path, **changes)
    environment = (
        ALONE | OFFLINE | {"OMP_NUM_THREADS": "1"} | ({"TMPDIR": str(small_disk)} if what == "the temporary folder" else {})
    )
    command = [sys.executable, "-m", "trainer", "train", "--config", str(path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert run.stdout
    lines = []
    for line in run.stdout:
        lines.append(line.strip())
        if line.startswith("step 15/"):
            fill(small_disk / "ballast")
    assert run.wait(60) == 1, lines
    assert re.match(
        r"failed: worker 0 has met a full disk; free space there and start the run again: .*No space left on device", lines[-1]
    ), lines
    assert "Traceback (most recent call last):" not in lines
    [folder] = Path(changes.get("storage", {}).get("uri", tmp_path / "runs")).glob("tiny-*")
    assert not (folder / "model" / "config.json").exists()
    if what == "the run's folder":
        assert str(folder) in lines[-1]
    else:  # where there is room for it, the cause is written down
        assert lines[-1] == f"failed: {json.loads((folder / 'outcome.json').read_text())['cause']}"
    (small_disk / "ballast").unlink()
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, 61))


def fill(path: Path) -> None:
    """Writes into a file until its disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
