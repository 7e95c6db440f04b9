"""What dies or hangs under a real Ray Train run: the others stop, all start again, and no step is lost or seen twice."""

import itertools
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import run_processes
from test_driver import start, write_config
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
        "the memory of worker 3's GPU is too small for batch.micro_batch 1 and data.sequence_length 128 "
        "(CUDA out of memory); lower one, or take more workers"
    )
