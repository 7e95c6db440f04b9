"""Checkpoints: written behind the loop, so that a half-written one is never taken for a whole one, and found again.

A checkpoint is the folder `checkpoints/step-00000120.a0003/` (step, attempt). Each rank stages its shards in one buffer
of host memory, which is all that the loop waits for; a thread uploads it as a safetensors file, then `rank-00003.json`
with its checksum and rows. Rank 0's thread writes `manifest.json` once every rank's is there. A folder without a
manifest that holds true does not exist for a reader. Attempts never share a folder. Threads use no collectives: a rank
that fails says so in its own json, and ranks meet in the store.
"""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.config import CheckpointConfig, RunError
from trainer.optim import set_step
from trainer.parallel import World
from trainer.storage import Storage

MANIFEST = "manifest.json"
FOLDER = re.compile(r"checkpoints/(step-(\d{8})\.a(\d{4}))/")
TOLERATED_FAILURES = 3  # saves in a row that may fail before the run does; the last one of a run never may
LEAVE_SECONDS = 60
DTYPES = {  # safetensors' names, https://github.com/huggingface/safetensors#format
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedError(OSError):
    """A file of a checkpoint is not the one that was written."""


@dataclass(frozen=True)
class Shard:
    """This rank's rows of a tensor: `rows` of them from row `start` on, at `offset` of the file's data."""

    tensor: torch.Tensor
    start: int
    rows: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def local_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Shard]:
    """What this rank holds of every tensor that a resumed run needs: parameters, persistent buffers, AdamW's moments."""
    persistent = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    shards, offset = {}, 0
    # Without holes, as safetensors wants it, and yet aligned: the widest types come first.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        start = 0
        if isinstance(tensor, DTensor):
            shape, place = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            tensor, start = tensor.to_local()[: shape[0]], place[0] if shape[0] else 0
        shards[name] = Shard(tensor.detach(), start, len(tensor) if tensor.ndim else 1, offset)
        offset += shards[name].num_bytes
    return shards


class Checkpoints:
    """The checkpoints of one run. `attempt` grows with every start of its workers."""

    def __init__(
        self, storage: Storage, config: CheckpointConfig, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ):
        self.storage, self.config, self.world, self.optimizer = storage, config, world, optimizer
        self.attempt = world.main_first(self._next_attempt)
        self.resumed_from = 0
        self.shards = local_shards(model, optimizer)
        self.header = _header(self.shards)
        self.upload: threading.Thread | None = None
        self.failures: list[str] = []  # of the last saves in a row, as rank 0 knows them
        self.buffer: torch.Tensor | None = None
        # A CPU that trains has no time to give to an upload beside it, and memory for one copy of the state is a lot.
        self.behind = world.device.type == "cuda"
        world.on_leave.append(self._leave)

    def _next_attempt(self) -> int:
        attempt = 1 + max((int(Path(key).name) for key in self.storage.list("attempts") if Path(key).name.isdigit()), default=0)
        while not self.storage.write(f"attempts/{attempt:04d}", b"", if_absent=True):
            attempt += 1
        return attempt

    def check_newest(self) -> None:
        """RunError where the run has a newer attempt: what this one would write there is not wanted any more."""
        if f"attempts/{self.attempt + 1:04d}" in self.storage.list("attempts"):
            raise RunError("a newer attempt goes on with this run; this one, which had fallen silent, leaves it alone")

    # ---- saving ----

    def save(self, step: int) -> None:
        """Stages the state after `step`; the rest goes on behind the loop, where a GPU runs it. A collective.

        Waits first for the save before it, so that host memory holds one copy of the state at most. RunError where too
        many saves in a row have failed.
        """
        self._wait()
        failures = self.world.main_first(lambda: self.failures)
        if len(failures) > TOLERATED_FAILURES:
            raise RunError(f"{len(failures)} checkpoints in a row could not be stored: {failures[-1]}")
        self._stage()
        self.upload = threading.Thread(target=self._store, args=(step,), daemon=True)
        self.upload.start()
        if not self.behind:
            self._wait()

    def finish(self) -> None:
        """Waits until the last save is complete on every rank; RunError where it is not. A collective."""
        self._wait()
        if failures := self.world.main_first(lambda: self.failures):
            raise RunError(f"the last checkpoint could not be stored: {failures[-1]}")

    def _leave(self) -> None:
        """Gives the save under way time to end, where the run does not end well."""
        if self.upload:
            self.upload.join(LEAVE_SECONDS)

    def _wait(self) -> None:
        if self.upload:
            self.upload.join()

    def _stage(self) -> None:
        """Copies this rank's shards into host memory, in the order of the file."""
        if self.buffer is None:
            last = next(reversed(self.shards.values()))
            size = len(self.header) + last.offset + last.num_bytes
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.world.device.type == "cuda")
            self.buffer[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for shard in self.shards.values():
            begin = len(self.header) + shard.offset
            target = self.buffer[begin : begin + shard.num_bytes].view(shard.tensor.dtype).view(shard.tensor.shape)
            target.copy_(shard.tensor, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _store(self, step: int) -> None:
        """In a thread: uploads the staged buffer, and on rank 0 completes the checkpoint."""
        folder = f"checkpoints/step-{step:08d}.a{self.attempt:04d}"
        try:
            facts = self._upload(f"{folder}/rank-{self.world.rank:05d}.safetensors")
        except Exception as error:
            facts = {"error": _reason(error)}
        if self.world.device.type != "cuda":
            self.buffer = None  # where nothing is pinned, memory is worth more than the time to ask for it
        try:
            self.storage.write(f"{folder}/rank-{self.world.rank:05d}.json", json.dumps(facts).encode())
            if self.world.is_main:
                self._commit(folder, step)
                self.failures = []
        except Exception as error:
            self.failures = [*self.failures, _reason(error)]

    def _upload(self, key: str) -> dict[str, Any]:
        assert self.buffer is not None
        data = memoryview(self.buffer.numpy())  # pyright: ignore[reportArgumentType]
        self.storage.write(key, data)
        rows = {name: [shard.start, shard.rows] for name, shard in self.shards.items()}
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "rows": rows}

    def _commit(self, folder: str, step: int) -> None:
        """Waits for every rank's json, writes the manifest and deletes what retention does not keep."""
        wait, names = 0.02, {f"{folder}/rank-{rank:05d}.json" for rank in range(self.world.size)}
        while not names <= self.storage.list(folder).keys():
            time.sleep(wait)
            wait = min(1.0, 1.5 * wait)
        parts = {
            name.removeprefix(f"{folder}/").replace(".json", ".safetensors"): json.loads(self.storage.read(name)) for name in names
        }
        if failed := [part["error"] for part in parts.values() if "error" in part]:
            raise OSError(failed[0])
        self.check_newest()
        manifest = {
            "step": step,
            "attempt": self.attempt,
            "resumed_from": self.resumed_from,
            "world_size": self.world.size,
            "time": time.time(),
            "files": dict(sorted(parts.items())),
        }
        self.storage.write(f"{folder}/{MANIFEST}", json.dumps(manifest).encode(), if_absent=True)
        self._retain()

    def _retain(self) -> None:
        """Deletes the checkpoints that are not to be kept, and what attempts that died have left of theirs."""
        line, every = find_checkpoints(self.storage), self.config.keep_every_steps
        kept = {folder for folder, _ in line[: self.config.keep_last]}
        kept |= {folder for folder, manifest in line if every and manifest["step"] % every == 0}
        folders = {match[0].rstrip("/"): int(match[3]) for key in self.storage.list("checkpoints") if (match := FOLDER.match(key))}
        for old in sorted(found for found, attempt in folders.items() if found not in kept and attempt <= self.attempt):
            # Without its manifest first, so that no reader meets a folder that is half gone.
            self.storage.delete([f"{old}/{MANIFEST}"])
            self.storage.delete(list(self.storage.list(old)))

    # ---- resuming ----

    def restore(self) -> int:
        """Loads the newest complete checkpoint and returns its step, or 0 where there is none. A collective.

        One with a damaged file is passed over for the one before it, on all ranks alike. A store that cannot be read
        says nothing of the checkpoint, so that raises OSError: to start before it would throw it away.
        """
        for folder, manifest in self.world.main_first(lambda: find_checkpoints(self.storage)):
            problems: list[Exception | None] = [None] * self.world.size
            dist.all_gather_object(problems, self._load(folder, manifest))
            found = [problem for problem in problems if problem is not None]
            if not found:
                set_step(self.optimizer, manifest["step"])
                self.resumed_from = manifest["step"]
                return manifest["step"]
            if other := [problem for problem in found if not isinstance(problem, DamagedError)]:
                raise OSError(f"{folder} could not be read: {other[0]}")
            if self.world.is_main:
                print(f"warning: {folder} is passed over: {found[0]}", flush=True)
        for name, shard in self.shards.items():
            if name.startswith("optimizer."):  # a load that failed half-way may have written some
                shard.tensor.zero_()
        return 0

    def _load(self, folder: str, manifest: dict[str, Any]) -> Exception | None:
        """Fills this rank's shards, reading only files that hold some of its rows; what went wrong, if anything."""
        try:
            for file, wanted in self._wanted(manifest["files"]).items():
                with _checked(self.storage, f"{folder}/{file}", manifest["files"][file]) as weights:
                    for name, (start, stop) in wanted.items():
                        _copy(self.shards[name], weights, name, start, stop, manifest["files"][file]["rows"][name][0])
        except DamagedError as error:
            return error
        except Exception as error:
            return OSError(_reason(error))
        return None

    def _wanted(self, files: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
        """By file, the rows [start, stop) of each tensor that this rank takes from it: its own, each from one file."""
        wanted: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for name, shard in self.shards.items():
            at, end = shard.start, shard.start + shard.rows
            for file, facts in files.items():
                start, rows = facts["rows"].get(name, (0, 0))
                if at < end and start <= at < start + rows:
                    stop = min(end, start + rows)
                    wanted[file][name] = (at, stop)
                    at = stop
            if at < end:
                raise DamagedError(f"rows {at} to {end} of {name} are in none of its files")
        return wanted


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _copy(shard: Shard, weights: Any, name: str, start: int, stop: int, first: int) -> None:
    """Rows [start, stop) of a tensor, of which the file has those from row `first` on."""
    if shard.tensor.ndim == 0:
        shard.tensor.copy_(weights.get_tensor(name))
    else:
        shard.tensor[start - shard.start : stop - shard.start].copy_(weights.get_slice(name)[start - first : stop - first])


def _header(shards: dict[str, Shard]) -> bytes:
    """The first bytes of a safetensors file: the length of a JSON text, and that text, which names each tensor's place."""
    entries = {
        name: {
            "dtype": DTYPES[shard.tensor.dtype],
            "shape": list(shard.tensor.shape),
            "data_offsets": [shard.offset, shard.offset + shard.num_bytes],
        }
        for name, shard in shards.items()
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def _checked(storage: Storage, key: str, facts: dict[str, Any]) -> Iterator[Any]:
    """A checkpoint's file, open as safetensors, once its checksum is the manifest's."""
    with storage.local_copy(key) as path:
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != facts["sha256"]:
                raise DamagedError(f"{Path(key).name} does not have the checksum of the manifest")
        try:
            with safe_open(path, framework="pt") as weights:
                yield weights
        except SafetensorError as error:
            raise DamagedError(f"{Path(key).name} is no safetensors file: {error}") from None


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
