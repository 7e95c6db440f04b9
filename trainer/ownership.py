"""Two drivers never write one run: a newcomer makes the holder save and leave, then goes on from there.

`owner.json` names the holder, who rewrites it as a heartbeat; every write is conditional on the version that was read,
so that of two only one succeeds. A newcomer writes `handover.json`; the holder sees it with the next heartbeat, saves,
leaves and marks its record released. A holder that falls silent loses the run: the newcomer counts by its own clock for
how long the record did not change, so clocks need not agree, and a holder that wakes up finds another's record.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from trainer.config import InputError, RunError, RunFile
from trainer.storage import Storage

OWNER, HANDOVER = "owner.json", "handover.json"
HEARTBEAT_SECONDS = 5.0
ASK_SECONDS = 1.0
SILENCE_SECONDS = 60.0  # and the grace period: so long a record stays unchanged before its holder is taken for dead


class Ownership:
    """This driver's hold on a run. `asked` is called once when a newcomer wants the run, `lost` is set when it may have it."""

    def __init__(self, storage: Storage, run: RunFile, asked: Callable[[], None]):
        self.storage, self.asked = storage, asked
        self.lost = threading.Event()
        self.loss = "another driver has taken this run over, as this one had fallen silent; it goes on there"
        self.handed_over = False
        self.leaving = threading.Event()
        self.release_name = run.release.name if run.release else None
        self.takeover = run.trainer.takeover
        self.record: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "release": self.release_name,
            "host": _host(),
            "pid": os.getpid(),
            "silence_seconds": run.hardware.grace_seconds + SILENCE_SECONDS,
            "beat": 0,
            "released": False,
        }
        self.version = ""
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def acquire(self, say: Callable[[str], None], stop: threading.Event) -> bool:
        """Waits until this driver holds the run, or says False once `stop` is set; InputError where another release holds it."""
        seen, since, told = "", time.monotonic(), False
        while not self._write(if_absent=True):
            try:
                data, version = self.storage.read_version(OWNER)
            except FileNotFoundError:
                continue
            owner = _parse(data)
            if owner["id"] and owner["release"] != self.release_name and not owner["released"] and not self.takeover:
                who = f"release {owner['release']}" if owner["release"] else f"a run outside a cluster, on {owner['host']}"
                raise InputError(f"storage.uri: {who} holds this run; change name, or set takeover to have it save and leave")
            if version != seen:
                seen, since = version, time.monotonic()
            silent = time.monotonic() - since
            if owner["released"] or _is_dead(owner) or silent > owner["silence_seconds"]:
                if self._write(if_version=version):
                    break
                continue
            if not told:
                say("another driver holds this run: asking it to save and leave")
                told = True
            self.storage.write(HANDOVER, self.record["id"].encode(), if_absent=True)
            if stop.wait(ASK_SECONDS):
                return False
        self.storage.delete([HANDOVER])
        self.thread.start()
        return True

    def release(self) -> None:
        """Lets the next driver have the run at once."""
        self.leaving.set()
        if self.thread.is_alive():
            self.thread.join()
        if not self.lost.is_set():
            self.record["released"] = True
            with contextlib.suppress(Exception):  # then the next driver waits until this one has been silent
                self._write(if_version=self.version)

    def check(self) -> None:
        """RunError where another driver has the run, or may have it."""
        if self.lost.is_set():
            raise RunError(self.loss)

    def _write(self, if_absent: bool = False, if_version: str | None = None) -> bool:
        """Writes this driver's record where the condition holds, and remembers its version."""
        data = json.dumps(self.record).encode()
        if not self.storage.write(OWNER, data, if_absent=if_absent, if_version=if_version):
            return False
        found, self.version = self.storage.read_version(OWNER)
        return _parse(found)["id"] == self.record["id"]

    def _beat(self) -> None:
        """In a thread: rewrites the record until this driver leaves, and looks for a newcomer's wish."""
        last = time.monotonic()
        while not self.leaving.wait(HEARTBEAT_SECONDS):
            try:
                self.record["beat"] += 1
                if not self._write(if_version=self.version) and not self._still_ours():
                    self.lost.set()
                    return
                last = time.monotonic()
                if not self.handed_over and self._is_wanted():
                    self.handed_over = True
                    self.asked()
            except Exception as error:  # a store that does not answer for a while is no reason to stop
                if (silent := time.monotonic() - last) > self.record["silence_seconds"]:
                    self.loss = (
                        f"another driver may have this run by now, as nothing could be written to {self.storage.uri} for "
                        f"{silent:.0f} s: {' '.join(str(error).split())}"
                    )
                    self.lost.set()
                    return

    def _is_wanted(self) -> bool:
        try:
            return bool(self.storage.read(HANDOVER))
        except FileNotFoundError:
            return False

    def _still_ours(self) -> bool:
        """A write may have succeeded though its answer was lost."""
        data, self.version = self.storage.read_version(OWNER)
        return _parse(data)["id"] == self.record["id"]


def _parse(data: bytes) -> dict[str, Any]:
    """A holder's record; one that cannot be read is of nobody, and gives way when it falls silent."""
    unknown = {"id": "", "release": None, "host": "", "pid": 0, "silence_seconds": SILENCE_SECONDS, "released": False}
    try:
        return unknown | json.loads(data)
    except (ValueError, TypeError):
        return unknown


def _host() -> str:
    """This machine and its space of process ids, in which a number means one process."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is no more, so that nobody need wait for its silence."""
    if owner["host"] != _host() or not owner["pid"]:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
