"""Checkpoints: written behind the loop, so that a half-written one is never taken for a whole one, and found again.

A checkpoint is the folder `checkpoints/step-00000120.a0003/` (step, attempt). Each rank stages its shards in one buffer
of host memory, which is all that the loop waits for; a thread uploads it as a safetensors file and tells the other
ranks' threads its checksum and rows, or what went wrong. On a CPU the loop waits for the upload, which then needs no
copy. Rank 0's thread writes `manifest.json` once every rank's file is there. A folder without a manifest that holds true
does not exist for a reader. Attempts never share a folder. The threads have a process group of their own: on the loop's,
their collectives would meet its own, and a rank that dies ends the wait of the others at once.
"""

import contextlib
import hashlib
import json
import mmap
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from trainer.config import CheckpointConfig, RunError
from trainer.optim import MOMENTS, set_step
from trainer.parallel import START_SECONDS, World, own_rows
from trainer.storage import DamagedError, Storage

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
    """What this rank holds of every tensor that a resumed run needs: trained parameters, persistent buffers, AdamW's moments."""
    persistent = model.state_dict().keys()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in trained.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, parameter in trained.items():
        for moment in MOMENTS:
            if parameter in optimizer.state:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    shards, offset = {}, 0
    # Without holes, as safetensors wants it, and yet aligned: the widest types come first.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        rows, start = own_rows(tensor)
        shards[name] = Shard(rows, start, len(rows) if rows.ndim else 1, offset)
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
        self.loop: dict[str, Any] = {}  # what the checkpoint knew of the loop that was resumed from
        self.shards = local_shards(model, optimizer)
        self.header = _header(self.shards)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_SECONDS))
        self.upload: threading.Thread | None = None
        self.failures: list[str] = []  # of the last saves in a row, as rank 0 knows them
        # A CPU that trains has no time to give to an upload beside it, and memory for one copy of the state is a lot.
        self.staging = ThreadPoolExecutor(1).submit(self._host_memory) if world.runs_ahead else None
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

    def save(self, step: int, loop: dict[str, Any] | None = None) -> None:
        """Stages the state after `step`, with what the loop knows; the rest goes on behind it, where a GPU runs it. A collective.

        Waits first for the save before it, so that host memory holds one copy of the state at most. RunError where too
        many saves in a row have failed.
        """
        began = time.monotonic()
        self._wait()
        if self.world.is_main and (waited := time.monotonic() - began) > 1:
            print(
                f"warning: step {step} waited {waited:.0f} s for the checkpoint before it; raise checkpoint.every_steps", flush=True
            )
        failures = self.world.main_first(lambda: self.failures)
        if len(failures) > TOLERATED_FAILURES:
            raise RunError(f"{len(failures)} checkpoints in a row could not be stored: {failures[-1]}")
        pieces = self._live() if self.staging is None else self._stage(self.staging.result())
        self.upload = threading.Thread(target=self._store, args=(step, pieces, loop or {}), daemon=True)
        self.upload.start()
        if self.staging is None:
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

    def _host_memory(self) -> torch.Tensor:
        """In a thread, ahead of the first save: a buffer for this rank's file, page-locked for a GPU.

        Of that size: torch's own allocator of such memory would take the next power of two.
        """
        last = next(reversed(self.shards.values()))
        size = len(self.header) + last.offset + last.num_bytes
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffer.zero_()
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # a thread begins on the first one
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
        buffer[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        return buffer

    def _stage(self, buffer: torch.Tensor) -> list[memoryview]:
        """Copies this rank's shards into host memory, in the order of the file; the file's content."""
        for shard in self.shards.values():
            begin = len(self.header) + shard.offset
            target = buffer[begin : begin + shard.num_bytes].view(shard.tensor.dtype).view(shard.tensor.shape)
            target.copy_(shard.tensor, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return [_bytes(buffer)]

    def _live(self) -> list[memoryview]:
        """The file's content, as pieces of the memory that is trained on."""
        return [memoryview(self.header), *(_bytes(shard.tensor) for shard in self.shards.values())]

    def _store(self, step: int, pieces: list[memoryview], loop: dict[str, Any]) -> None:
        """In a thread: uploads this rank's file, and on rank 0 completes the checkpoint."""
        folder = f"checkpoints/step-{step:08d}.a{self.attempt:04d}"
        file = f"rank-{self.world.rank:05d}.safetensors"
        try:
            facts = self._upload(f"{folder}/{file}", pieces)
        except Exception as error:
            facts = {"error": _reason(error)}
        files: list[Any] = [None] * self.world.size
        try:
            dist.all_gather_object(files, (file, facts), group=self.group)
            if self.world.is_main:
                self._commit(folder, step, loop, dict(files))
                self.failures = []
        except Exception as error:
            self.failures = [*self.failures, _reason(error)]

    def _upload(self, key: str, pieces: list[memoryview]) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(_sha256, pieces)
            self.storage.write_large(key, pieces)
        rows = {name: [shard.start, shard.rows] for name, shard in self.shards.items()}
        return {"bytes": sum(piece.nbytes for piece in pieces), "sha256": digest.result(), "rows": rows}

    def _commit(self, folder: str, step: int, loop: dict[str, Any], files: dict[str, Any]) -> None:
        """Writes the manifest, where every rank has stored its file, and deletes what retention does not keep."""
        if failed := [facts["error"] for facts in files.values() if "error" in facts]:
            self.storage.delete(list(self.storage.list(folder)))  # a full disk needs its space
            raise OSError(failed[0])
        self.check_newest()
        manifest = {
            "step": step,
            "attempt": self.attempt,
            "resumed_from": self.resumed_from,
            "world_size": self.world.size,
            "loop": loop,
            "time": time.time(),
            "files": files,
        }
        text = json.dumps(manifest | {"checksum": _checksum(manifest)})
        self.storage.write(f"{folder}/{MANIFEST}", text.encode(), if_absent=True)
        self._retain()

    def _retain(self) -> None:
        """Deletes the checkpoints that are not to be kept, and what attempts that died have left of theirs."""
        line, every = find_checkpoints(self.storage), self.config.keep_every_steps
        kept = {folder for folder, _ in line[: self.config.keep_last]}
        kept |= {folder for folder, manifest in line if every and manifest["step"] % every == 0}
        best = line[0][1].get("loop", {}).get("best", {}).get("step") if line else None
        kept |= {folder for folder, manifest in line if manifest["step"] == best}
        self._delete(lambda folder, keys: folder not in kept)

    def _delete(self, unwanted: Callable[[str, list[str]], bool]) -> None:
        """Deletes the folders of this and older attempts for which `unwanted` holds, of a folder and its keys."""
        folders: dict[str, list[str]] = defaultdict(list)
        for key in self.storage.list("checkpoints"):
            if self._is_ours(key):
                folders[key.rpartition("/")[0]].append(key)
        for folder, keys in sorted(folders.items()):
            if unwanted(folder, keys):
                # Without its manifest first, so that no reader meets a folder that is half gone.
                self.storage.delete([f"{folder}/{MANIFEST}"])
                self.storage.delete(keys)

    def _is_ours(self, key: str) -> bool:
        """Whether a key is of this attempt or an older one: what a newer one writes is its own affair."""
        match = FOLDER.match(key)
        return not match or int(match[3]) <= self.attempt

    # ---- resuming ----

    def restore(self) -> int:
        """Loads the newest complete checkpoint and returns its step, or 0 where there is none. A collective.

        One with a damaged file is passed over for the one before it, on all ranks alike. A store that cannot be read
        says nothing of the checkpoint, so that raises OSError: to start before it would throw it away.
        """
        for folder, manifest in self.world.main_first(self._take_stock):
            if self._load_all(folder, manifest):
                self.loop = manifest.get("loop", {})
                set_step(self.optimizer, manifest["step"] - self.loop.get("skipped_steps", 0))
                self.resumed_from = manifest["step"]
                return manifest["step"]
        for name, shard in self.shards.items():
            if name.startswith("optimizer."):  # a load that failed half-way may have written some
                shard.tensor.zero_()
        return 0

    def _take_stock(self) -> list[tuple[str, dict[str, Any]]]:
        """The checkpoints to try, newest first. What dead attempts have left half-written is deleted: it takes up space."""
        line = find_checkpoints(self.storage, _warn)
        self._delete(lambda folder, keys: f"{folder}/{MANIFEST}" not in keys)
        self.clear_unfinished()
        return line

    def clear_unfinished(self) -> None:
        """Ends writes that earlier attempts left, and at the end of this one its own: of an upload nobody knows where the answer was lost."""
        try:
            self.storage.clear_unfinished(
                lambda key: key.startswith(("checkpoints/", "model/", "metrics.jsonl")) and self._is_ours(key)
            )
        except Exception as error:  # it may not be allowed, and costs nothing but space
            _warn(f"unfinished writes could not be deleted: {_reason(error)}")

    def load(self, step: int) -> bool:
        """Takes the weights of the checkpoint of `step`, once training is over; False, and those of the newest one, where that is lost.

        A collective.
        """
        line = self.world.main_first(lambda: find_checkpoints(self.storage))
        if any(self._load_all(folder, manifest) for folder, manifest in line if manifest["step"] == step):
            return True
        self.restore()
        return False

    def _load_all(self, folder: str, manifest: dict[str, Any]) -> bool:
        """Fills the shards of all ranks; False on all of them where a file is damaged. A collective."""
        problems: list[Exception | None] = [None] * self.world.size
        dist.all_gather_object(problems, self._load(folder, manifest))
        found = [problem for problem in problems if problem is not None]
        if other := [problem for problem in found if not isinstance(problem, DamagedError)]:
            raise OSError(f"{folder} could not be read: {other[0]}")
        if found and self.world.is_main:
            _warn(f"{folder} is passed over: {found[0]}")
        return not found

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


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _sha256(pieces: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _checksum(manifest: dict[str, Any]) -> str:
    """Of a manifest without it: a number that a flipped bit made another would mislead a reader."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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


def find_checkpoints(storage: Storage, warn: Callable[[str], None] = lambda text: None) -> list[tuple[str, dict[str, Any]]]:
    """Folders with a manifest whose files are all there in full, newest first, with their manifests.

    A checkpoint of an older attempt beyond the step that a newer one went on from is of a line that was left. `warn` is
    told of what is wrong with the folders that are passed over.
    """
    sizes = storage.list("checkpoints")
    found = []
    for folder in sorted({match[0].rstrip("/") for key in sizes if (match := FOLDER.match(key))}):
        try:
            manifest = _read_manifest(storage, folder, sizes, warn)
            found.append((manifest["attempt"], manifest["step"], folder, manifest))
        except (DamagedError, FileNotFoundError) as error:
            warn(f"{folder} is passed over: {error}")
    line, limit = [], float("inf")
    for attempt in sorted({item[0] for item in found}, reverse=True):
        mine = sorted((item for item in found if item[0] == attempt and item[1] <= limit), reverse=True, key=lambda item: item[1])
        line += [(folder, manifest) for _, _, folder, manifest in mine]
        limit = min([limit, *(manifest["resumed_from"] for *_, manifest in mine)])
    return line


def _read_manifest(storage: Storage, folder: str, sizes: dict[str, int], warn: Callable[[str], None]) -> dict[str, Any]:
    """The manifest of a folder whose files are all there in full; DamagedError says what is not as it should be."""
    if f"{folder}/{MANIFEST}" not in sizes:
        raise DamagedError("it has no manifest, so its save did not end")
    try:
        manifest = json.loads(storage.read(f"{folder}/{MANIFEST}"))
        same = manifest.pop("checksum") == _checksum(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        same, manifest = False, {}
    if not same:
        raise DamagedError("its manifest is damaged")
    for name, file in manifest["files"].items():
        if (size := sizes.get(f"{folder}/{name}")) != file["bytes"]:
            raise DamagedError(f"{name} has {size} of {file['bytes']} bytes" if size is not None else f"{name} is missing")
    known = {MANIFEST, *manifest["files"]}
    if extra := {key.removeprefix(f"{folder}/") for key in sizes if key.startswith(f"{folder}/")} - known:
        warn(f"{folder} holds files that its manifest does not name, which are not read: {', '.join(sorted(extra))}")
    return manifest
