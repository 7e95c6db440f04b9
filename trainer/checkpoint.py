"""Checkpoints: written so that a half-written one is never taken for a whole one, and found again.

A checkpoint is the folder `checkpoints/step-00000120.a0003/` (step, attempt) with torch.distributed.checkpoint shards
and `manifest.json`, which is written last and lists every file with its size and SHA-256. A folder without a manifest
that holds true does not exist for a reader. Attempts never share a folder.
"""

import contextlib
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.optim import set_step
from trainer.parallel import World
from trainer.storage import Storage

MANIFEST = "manifest.json"
FOLDER = re.compile(r"checkpoints/(step-(\d{8})\.a(\d{4}))/")


def state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor that a resumed run needs, by name: parameters once each, persistent buffers, AdamW's moments."""
    persistent = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


class DamagedError(OSError):
    """A file of a checkpoint is not the one that was written."""


class Checkpoints:
    """The checkpoints of one run. `attempt` grows with every start of its workers."""

    def __init__(self, storage: Storage, keep: int, world: World):
        self.storage, self.keep, self.world = storage, keep, world
        self.attempt = world.main_first(self._next_attempt)
        self.resumed_from = 0

    def _next_attempt(self) -> int:
        attempt = 1 + max((int(Path(key).name) for key in self.storage.list("attempts") if Path(key).name.isdigit()), default=0)
        while not self.storage.write(f"attempts/{attempt:04d}", b"", if_absent=True):
            attempt += 1
        return attempt

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes the state after `step`; on return the checkpoint is complete on every rank. A collective."""
        folder = f"checkpoints/step-{step:08d}.a{self.attempt:04d}"
        with tempfile.TemporaryDirectory(prefix="ray-finetune-checkpoint-") as scratch:
            try:
                save(state_dict(model, optimizer), storage_writer=FileSystemWriter(scratch, sync_files=False))
            except CheckpointException as error:
                raise OSError(f"the checkpoint of step {step} could not be written: {_causes(error)}") from None
            outcome = self._upload(Path(scratch), folder)
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, outcome)
        if failed := [part for part in everyone if isinstance(part, str)]:
            raise OSError(f"the checkpoint of step {step} could not be stored: {failed[0]}")
        self.world.main_first(lambda: self._commit(folder, step, {name: f for part in everyone for name, f in part.items()}))

    def _upload(self, scratch: Path, folder: str) -> dict[str, Any] | str:
        """Sizes and checksums of this rank's files, or why it failed: raised here, the other ranks would wait for ever."""
        files = {}
        try:
            for path in scratch.iterdir():
                with path.open("rb") as stream:
                    files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(stream)}
                self.storage.upload(path, f"{folder}/{path.name}")
        except Exception as error:
            return str(error)
        return files

    def _commit(self, folder: str, step: int, files: dict[str, Any]) -> None:
        manifest = {
            "step": step,
            "attempt": self.attempt,
            "resumed_from": self.resumed_from,
            "world_size": self.world.size,
            "time": time.time(),
            "files": files,
        }
        self.storage.write(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=1).encode(), if_absent=True)
        kept = [found for found, _ in find_checkpoints(self.storage)[: self.keep]]
        folders = {match[0].rstrip("/"): int(match[3]) for key in self.storage.list("checkpoints") if (match := FOLDER.match(key))}
        for old in sorted(found for found, attempt in folders.items() if found not in kept and attempt <= self.attempt):
            # Without its manifest first, so that no reader meets a folder that is half gone.
            self.storage.delete([f"{old}/{MANIFEST}"])
            self.storage.delete(list(self.storage.list(old)))

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Loads the newest complete checkpoint and returns its step, or 0 where there is none. A collective.

        A checkpoint with a damaged file is passed over for the one before it; all ranks agree, as a failed read on
        one of them fails the load on all.
        """
        for folder, manifest in self.world.main_first(lambda: find_checkpoints(self.storage)):
            reader = _Reader(self.storage, folder, manifest["files"])
            try:
                self.world.main_first(reader.check_metadata)
                load(state_dict(model, optimizer), storage_reader=reader)
            except DamagedError as error:
                cause = str(error)
            except CheckpointException as error:
                cause = _causes(error)
                # A full disk or a refusing store says nothing of the checkpoint: to start before it would throw it away.
                if not all(isinstance(failure[0], DamagedError) for failure in error.failures.values()):
                    raise OSError(f"{folder} could not be read: {cause}") from None
            else:
                set_step(optimizer, manifest["step"])
                self.resumed_from = manifest["step"]
                return manifest["step"]
            if self.world.is_main:
                print(f"warning: {folder} is passed over: {cause}", flush=True)
        for name, tensor in state_dict(model, optimizer).items():
            if name.startswith("optimizer."):  # a load that failed half-way may have written some
                tensor.zero_()
        return 0


def find_checkpoints(storage: Storage) -> list[tuple[str, dict[str, Any]]]:
    """Folders with a manifest whose files are all there in full, newest first, with their manifests.

    A checkpoint of an older attempt beyond the step that a newer one went on from is of a line that was left.
    """
    sizes = storage.list("checkpoints")
    found = []
    for key in sizes:
        match = FOLDER.match(key)
        if match and key.endswith(f"/{MANIFEST}"):
            folder = f"checkpoints/{match[1]}"
            try:
                manifest = json.loads(storage.read(key))
                whole = all(sizes.get(f"{folder}/{name}") == file["bytes"] for name, file in manifest["files"].items())
                entry = (int(manifest["attempt"]), int(manifest["step"]), folder, manifest)
                int(manifest["resumed_from"])
            except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
                continue
            if whole:
                found.append(entry)
    line, limit = [], float("inf")
    for attempt in sorted({item[0] for item in found}, reverse=True):
        mine = sorted((item for item in found if item[0] == attempt and item[1] <= limit), reverse=True, key=lambda item: item[1])
        line += [(folder, manifest) for _, _, folder, manifest in mine]
        limit = min([limit, *(manifest["resumed_from"] for *_, manifest in mine)])
    return line


def _causes(error: CheckpointException) -> str:
    return "; ".join(sorted({str(cause[0]) for cause in error.failures.values()}))


def _sha256(stream: Any) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


class _Reader(FileSystemReader):
    """Reads shards from a Storage, each file checked against the manifest before it is used."""

    def __init__(self, storage: Storage, folder: str, files: dict[str, Any]):
        super().__init__(folder)
        self.fs = _CheckedFiles(storage, files)

    def check_metadata(self) -> None:
        """DamagedError or the store's own; torch would take either for a missing file and look for another."""
        with self.fs.create_stream(self._get_metadata_path(), "rb"):
            pass


class _CheckedFiles(FileSystem):
    def __init__(self, storage: Storage, files: dict[str, Any]):
        self.storage, self.files = storage, files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        expected = self.files.get(Path(path).name)
        if expected is None:
            raise DamagedError(f"{Path(path).name} is not in the manifest")
        with self.storage.open(str(path)) as stream:
            if _sha256(stream) != expected["sha256"]:
                raise DamagedError(f"{Path(path).name} does not have the checksum of the manifest")
            stream.seek(0)
            yield stream
