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


class Checkpoints:
    """The checkpoints of one run. `attempt` grows with every start of its workers."""

    def __init__(self, storage: Storage, keep: int, world: World):
        self.storage, self.keep, self.world = storage, keep, world
        self.attempt = world.main_first(self._next_attempt)
        self.resumed_from = 0

    def _next_attempt(self) -> int:
        attempt = 1 + max((int(Path(key).name) for key in self.storage.list("attempts")), default=0)
        while not self.storage.write(f"attempts/{attempt:04d}", b"", if_absent=True):
            attempt += 1
        return attempt

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes the state after `step`; on return the checkpoint is complete on every rank. A collective."""
        folder = f"checkpoints/step-{step:08d}.a{self.attempt:04d}"
        with tempfile.TemporaryDirectory(prefix="ray-finetune-checkpoint-") as scratch:
            writer = FileSystemWriter(scratch, sync_files=False)
            save(state_dict(model, optimizer), storage_writer=writer)
            files = {}
            for path in Path(scratch).iterdir():
                with path.open("rb") as stream:
                    files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(stream)}
                self.storage.upload(path, f"{folder}/{path.name}")
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, files)
        self.world.main_first(lambda: self._commit(folder, step, {name: f for part in everyone for name, f in part.items()}))

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
        complete = [found for found, _ in find_checkpoints(self.storage)]
        for old in complete[self.keep :]:
            # Without its manifest first, so that no reader meets a folder that is half gone.
            self.storage.delete([f"{old}/{MANIFEST}"])
            self.storage.delete(list(self.storage.list(old)))

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Loads the newest complete checkpoint and returns its step, or 0 where there is none. A collective.

        A checkpoint with a damaged file is passed over for the one before it; all ranks agree, as a failed read on
        one of them fails the load on all.
        """
        for folder, manifest in self.world.main_first(lambda: find_checkpoints(self.storage)):
            try:
                load(state_dict(model, optimizer), storage_reader=_Reader(self.storage, folder, manifest["files"]))
            except CheckpointException as error:
                if self.world.is_main:
                    causes = "; ".join(sorted({str(cause[0]) for cause in error.failures.values()}))
                    print(f"warning: {folder} is passed over: {causes}", flush=True)
                continue
            set_step(optimizer, manifest["step"])
            self.resumed_from = manifest["step"]
            return manifest["step"]
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
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if whole:
                found.append((manifest["attempt"], manifest["step"], folder, manifest))
    line, limit = [], float("inf")
    for attempt in sorted({item[0] for item in found}, reverse=True):
        mine = sorted((item for item in found if item[0] == attempt and item[1] <= limit), reverse=True, key=lambda item: item[1])
        line += [(folder, manifest) for _, _, folder, manifest in mine]
        limit = min([limit, *(manifest["resumed_from"] for *_, manifest in mine)])
    return line


def _sha256(stream: Any) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


class _Reader(FileSystemReader):
    """Reads shards from a Storage, each file checked against the manifest before it is used."""

    def __init__(self, storage: Storage, folder: str, files: dict[str, Any]):
        super().__init__(folder)
        self.fs = _CheckedFiles(storage, files)


class _CheckedFiles(FileSystem):
    def __init__(self, storage: Storage, files: dict[str, Any]):
        self.storage, self.files = storage, files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        expected = self.files.get(Path(path).name)
        if expected is None:
            raise OSError(f"{Path(path).name} is not in the manifest")
        with self.storage.open(str(path)) as stream:
            if _sha256(stream) != expected["sha256"]:
                raise OSError(f"{Path(path).name} does not have the checksum of the manifest")
            stream.seek(0)
            yield stream
