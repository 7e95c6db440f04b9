"""Processes that outlive the command which started them, and are ended by a later one: by pid and start time, so never another's."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


def start(pids: Path, logs: Path, name: str, command: list[str], environment: dict[str, str]) -> None:
    """In a session of its own, with its output in logs/NAME.log."""
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    (pids / name).write_text(f"{process.pid} {started(process.pid)}")


def alive(pids: Path, name: str) -> bool:
    return pid_of(pids, name) is not None


def stop(pids: Path, name: str) -> None:
    """SIGTERM, and SIGKILL to what is still there ten seconds later."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        pid = pid_of(pids, name)
        if pid is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while alive(pids, name) and time.monotonic() < deadline:
            time.sleep(0.1)
    (pids / name).unlink(missing_ok=True)


def pid_of(pids: Path, name: str) -> int | None:
    """The pid of a started process that still runs."""
    try:
        pid, start_time = (pids / name).read_text().split()
    except FileNotFoundError:
        return None
    return int(pid) if started(int(pid)) == start_time else None


def started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None for one that is no more, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
