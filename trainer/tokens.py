"""The token store: a data set checked, rendered and tokenised once, in columns that training maps into memory.

It lies at `<storage.uri>/tokens/<key>/`, the key a hash of everything its content follows from, so that runs with the
same data share it. Columns are files named by their own checksum and `index.json`, which lists them, is written last
and only where there is none: jobs that build the same store at once can't disturb one another.
"""

import contextlib
import fcntl
import hashlib
import heapq
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from trainer.config import DataConfig, InputError, RunError, Settings
from trainer.encoding import Encoded, Encoder
from trainer.rows import parse_line, parse_row
from trainer.sources import Piece, Source, raw_rows
from trainer.storage import LocalStorage, Storage

# Part of the key: raised whenever the same rows would give other columns.
STORE_VERSION = 3
NUM_SAMPLES = 16  # rows kept as text, to be asked in evaluations
INLINE_PIECES = 4  # this few are encoded here; more are worth starting processes for
SAY_SECONDS = 10
SCRATCH = "ray-finetune-tokens-"

# One value a token, then one a row: where it starts, how long it is, how many labels it has and what each weighs, hashes
# of its tokens and of its prompt's, its source's and file's number and its line.
COLUMNS = {
    "ids": np.int32,
    "supervised": np.bool_,
    "starts": np.int64,
    "lengths": np.int32,
    "labels": np.int32,
    "weights": np.float32,
    "hashes": np.uint64,
    "prompts": np.uint64,
    "sources": np.int32,
    "files": np.int32,
    "lines": np.int64,
}


@dataclass(frozen=True)
class Tokens:
    """Tokenised rows: row r is ids[starts[r]:starts[r] + lengths[r]]. The arrays are COLUMNS, most often maps of files."""

    ids: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    hashes: np.ndarray
    prompts: np.ndarray
    sources: np.ndarray
    files: np.ndarray
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a row, and which of them are supervised."""
        place = slice(self.starts[row], self.starts[row] + self.lengths[row])
        return self.ids[place], self.supervised[place]

    def select(self, rows: np.ndarray) -> "Tokens":
        """These rows alone, in this order."""
        per_row = {name: getattr(self, name)[rows] for name in COLUMNS if name not in ("ids", "supervised")}
        return Tokens(self.ids, self.supervised, **per_row)


class Index(Settings):
    """index.json: what a store holds and how its rows came out."""

    columns: dict[str, str]
    """File name of each column."""

    sha256: str
    """Of the token ids and their masks: what training depends on."""

    num_rows: int
    """Rows of tokens."""

    num_read: int
    """Rows read from the sources."""

    num_tokens: int
    num_supervised: int

    skipped: dict[str, int]
    """Rows left out, by reason."""

    places: dict[str, str]
    """The first file:line of each of these reasons."""

    num_truncated: int
    num_split: int
    """Rows cut short, and rows cut into several."""

    num_dropped: int
    """Pieces of split rows that hold nothing to learn from."""

    num_ended: int
    """Rows read whose supervised part ends with a special token."""

    end_of_turn: int | None
    """The special token that most rows' supervised part ends with."""

    files: list[str]
    """Name of each file, by the number that `files` has."""

    samples: list[dict[str, Any]]
    """Rows as text, those with the smallest hashes: {row, messages or prompt, reference}."""

    def size(self, column: str) -> int:
        """Bytes of a column's file."""
        return (self.num_tokens if column in ("ids", "supervised") else self.num_rows) * np.dtype(COLUMNS[column]).itemsize


def store_key(sources: list[Source], tokenizer: Any, config: DataConfig) -> str:
    """Sixteen hex digits over all that a store's content follows from: files, tokenizer, template and how rows are treated."""
    facts = {
        "version": STORE_VERSION,
        "files": [(file.name, file.version, file.source) for source in sources for file in source.files],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "data": config.model_dump(include=TREATMENT),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


TREATMENT = {
    "sequence_length",
    "long_rows",
    "invalid_rows",
    "max_skipped_fraction",
    "supervised_roles",
    "last_turn_only",
}


def find_index(storage: Storage, key: str) -> Index | None:
    """The index of a store of which every column is there whole, or None."""
    try:
        index = Index.model_validate_json(storage.read(f"{key}/index.json"))
    except (FileNotFoundError, ValueError):
        return None
    present = storage.list(key)
    whole = index.columns.keys() == COLUMNS.keys() and all(
        present.get(f"{key}/{file}") == index.size(name) for name, file in index.columns.items()
    )
    return index if whole else None


def load_tokens(storage: Storage, key: str, cache: Path) -> tuple[Index, Tokens]:
    """A store's columns, mapped into memory: in place where it is on a local disk, else from a copy under `cache`."""
    index = find_index(storage, key)
    if index is None:
        raise RunError(f"the token store {storage.uri}/{key} is gone; start the run again to build it anew")
    if isinstance(storage, LocalStorage):
        folder = storage.root / key
    else:
        folder = cache / "tokens" / key
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for name, file in index.columns.items():
                if not (folder / file).is_file() or (folder / file).stat().st_size != index.size(name):
                    storage.download(f"{key}/{file}", folder / f".{file}")
                    (folder / f".{file}").rename(folder / file)
    columns = {name: np.memmap(folder / file, COLUMNS[name], mode="r") for name, file in index.columns.items()}
    return index, Tokens(**columns)


def held_out_rows(tokens: Tokens, fraction: float) -> np.ndarray:
    """Which rows are held out, bool [rows]: the `fraction` with the smallest hashes, so that equal rows stay together."""
    distinct = np.unique(tokens.hashes)
    return tokens.hashes < distinct[min(len(distinct) - 1, max(1, round(fraction * len(distinct))))]


def contamination(train: Tokens, held_out: Tokens) -> tuple[int, int]:
    """How many held-out rows are among the training rows, and how many have a prompt that is."""
    rows = int(np.isin(held_out.hashes, train.hashes).sum())
    return rows, int((np.isin(held_out.prompts, train.prompts) & (held_out.prompts != 0)).sum())


# ---- building ----


def build_store(
    sources: list[Source], encoder: Encoder, config: DataConfig, storage: Storage, key: str, say: Callable[[str], None]
) -> Index:
    """Reads, checks and tokenises every row once, in bounded memory; InputError lists every kind of problem in them."""
    files = [(source, file) for source in sources for file in source.files]
    pieces = (piece for number, (source, file) in enumerate(files) for piece in source.pieces(file, number))
    with _stop_asked() as stopped, _scratch_folder() as scratch:
        writer = _Writer(scratch, [file.source for _, file in files], [file.name for _, file in files], config)
        since = said = time.monotonic()
        with contextlib.closing(_encode_all(pieces, encoder, config, stopped)) as batches:
            for batch in batches:
                writer.add(batch)
                if stopped():
                    raise Stopped
                if time.monotonic() - said > SAY_SECONDS:
                    said = time.monotonic()
                    say(f"{writer.num_read:,} rows read, {writer.num_read / (said - since):,.0f} a second")
        index = writer.finish(encoder.special_ids)
        for name, file in index.columns.items():
            storage.upload(scratch / name, f"{key}/{file}")
    storage.write(f"{key}/index.json", index.model_dump_json(indent=1).encode(), if_absent=True)
    found = find_index(storage, key)
    if found is None:  # someone's index is there, but not all of its columns: theirs were deleted
        storage.write(f"{key}/index.json", index.model_dump_json(indent=1).encode())
    return found or index


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder; first removes those that killed processes left behind, which no longer hold the lock in them."""
    for owner in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/owner"):
        with contextlib.suppress(OSError), owner.open("a") as lock:  # it is held, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}"))
    with (made / "owner").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(made.with_name(made.name[1:]))  # others see it from now on, when it is locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT came while rows were tokenised; nothing of them is kept."""


@contextlib.contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """Says whether SIGTERM or SIGINT has come, and has whoever handled them before know, too.

    By default SIGTERM would end the process at once, and leave the scratch folder behind.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield asked.is_set
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: Any) -> None:
        asked.set()
        known = before[signal.Signals(number)]
        if callable(known) and known is not signal.default_int_handler:
            known(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield asked.is_set
    finally:
        for number, known in before.items():
            signal.signal(number, known)


@dataclass
class _Batch:
    """What one piece came out as: rows with their file and line, and problems by reason."""

    file: int
    rows: list[tuple[int, Encoded]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    num_read: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)  # the token that each row's supervised part ends with


def encode_piece(encoder: Encoder, config: DataConfig, piece: Piece) -> _Batch:
    batch = _Batch(piece.file)
    lines, rows = [], []
    for line, raw in raw_rows(piece):
        batch.num_read += 1
        try:
            rows.append(parse_row(parse_line(raw) if isinstance(raw, bytes) else raw))
            lines.append(line)
        except ValueError as error:
            batch.problems.append((line, str(error)))
    for line, encoded in zip(lines, encoder.encode(rows), strict=True):
        try:
            if isinstance(encoded, ValueError):
                raise encoded
            parts = _fitted(encoded, config, batch.counts)
            batch.rows += [(line, part) for part in parts]
            batch.ends[int(parts[-1].ids[parts[-1].supervised][-1])] += 1
        except ValueError as error:
            batch.problems.append((line, str(error)))
    return batch


def _fitted(row: Encoded, config: DataConfig, counts: Counter[str]) -> list[Encoded]:
    """The row, or what `long_rows` makes of it; ValueError where nothing to learn from would be left."""
    limit = config.sequence_length
    parts = [row]
    if len(row.ids) > limit:
        if config.long_rows == "error":
            raise ValueError(
                f"longer than data.sequence_length ({limit} tokens); raise it, or set data.long_rows to truncate or split"
            )
        parts = [row.cut(start, start + limit) for start in range(0, len(row.ids), limit)]
        if config.long_rows == "truncate":
            parts = parts[:1]
    kept = [part for part in parts if part.num_labels]
    if not kept:
        reason = (
            f"within data.sequence_length ({limit}); shorten the prompt or raise it" if row.num_labels else "in the row; remove it"
        )
        raise ValueError(f"no supervised token that can be predicted {reason}")
    if len(row.ids) > limit:
        counts["truncated" if config.long_rows == "truncate" else "split"] += 1
    counts["dropped"] += len(parts) - len(kept)
    return [kept[0], *(replace(part, sample=None) for part in kept[1:])]  # a row is asked once


def _encode_all(
    pieces: Iterator[Piece], encoder: Encoder, config: DataConfig, stopped: Callable[[], bool]
) -> Generator[_Batch, None, None]:
    """Every piece's batch, in order: here while there are few, else on all CPUs, with a bounded number under way."""
    first = list(itertools.islice(pieces, INLINE_PIECES))
    if len(first) < INLINE_PIECES or usable_cpus() == 1:
        yield from (encode_piece(encoder, config, piece) for piece in itertools.chain(first, pieces))
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.tokens"])
    workers = usable_cpus()
    pool = ProcessPoolExecutor(workers, context, _start, (encoder, config))
    try:
        ahead = itertools.islice(pieces, 2 * workers)
        under_way: deque[Future[_Batch]] = deque(pool.submit(_encode_there, piece) for piece in ahead)
        yield from (encode_piece(encoder, config, piece) for piece in first)  # while the processes start
        for piece in pieces:
            under_way.append(pool.submit(_encode_there, piece))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        if stopped():  # the signal has reached all processes of a terminal
            raise Stopped from None
        raise RunError(
            "a tokenising process was killed, most often for lack of memory; give the driver more memory, or fewer CPUs"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_here: tuple[Encoder, DataConfig] | None = None


def _start(encoder: Encoder, config: DataConfig) -> None:
    """Makes a process ready to encode: it leaves Ctrl-C to the one that started it, and ends when that one has ended."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _here = (encoder, config)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_there(piece: Piece) -> _Batch:
    assert _here is not None
    return encode_piece(*_here, piece)


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, or less where its cgroup has a quota, as a pod's limit sets it."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


class _Writer:
    """Appends rows to the columns' files, and keeps count of everything that an index says."""

    def __init__(self, folder: Path, source_of_file: list[int], files: list[str], config: DataConfig):
        self.folder, self.config, self.files, self.source_of_file = folder, config, files, source_of_file
        self.streams = {name: (folder / name).open("wb") for name in COLUMNS}
        self.num_read = self.num_rows = self.num_tokens = self.num_supervised = 0
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.places: dict[str, str] = {}
        self.ends: Counter[int] = Counter()
        self.samples: list[tuple[int, int, dict[str, Any]]] = []  # a heap: (-hash, -row, sample)

    def add(self, batch: _Batch) -> None:
        self.num_read += batch.num_read
        self.counts += batch.counts
        self.ends += batch.ends
        for line, reason in batch.problems:
            self.places.setdefault(reason, f"{self.files[batch.file]}:{line}")
            self.skipped[reason] += 1
        if not batch.rows:
            return
        rows = [row for _, row in batch.rows]
        lengths = np.array([len(row.ids) for row in rows])
        columns = {
            "ids": np.concatenate([row.ids for row in rows]),
            "supervised": np.concatenate([row.supervised for row in rows]),
            "starts": self.num_tokens + np.cumsum([0, *lengths[:-1]]),
            "lengths": lengths,
            "labels": [row.num_labels for row in rows],
            "weights": [row.weight for row in rows],
            "hashes": np.array([row.hash for row in rows], np.uint64),
            "prompts": np.array([row.prompt_hash for row in rows], np.uint64),
            "sources": [self.source_of_file[batch.file]] * len(rows),
            "files": [batch.file] * len(rows),
            "lines": [line for line, _ in batch.rows],
        }
        for name, dtype in COLUMNS.items():
            self.streams[name].write(np.asarray(columns[name]).astype(dtype, copy=False).tobytes())
        for offset, row in enumerate(rows):
            if row.sample:
                push = heapq.heappush if len(self.samples) < NUM_SAMPLES else heapq.heappushpop
                push(self.samples, (-row.hash, -(self.num_rows + offset), row.sample))
        self.num_rows += len(rows)
        self.num_tokens += int(lengths.sum())
        self.num_supervised += int(np.sum(columns["labels"]))

    def finish(self, special_ids: np.ndarray) -> Index:
        for stream in self.streams.values():
            stream.close()
        self._refuse()
        digests = {name: LocalStorage(str(self.folder)).version(name) for name in COLUMNS}
        ends = Counter({token: count for token, count in self.ends.items() if token in special_ids})
        token, count = ends.most_common(1)[0] if ends else (None, 0)
        return Index(
            columns={name: f"{name}-{digest[:16]}.bin" for name, digest in digests.items()},
            sha256=hashlib.sha256(
                "".join(digests[name] for name in ("ids", "supervised", "lengths", "weights")).encode()
            ).hexdigest(),
            num_rows=self.num_rows,
            num_read=self.num_read,
            num_tokens=self.num_tokens,
            num_supervised=self.num_supervised,
            skipped=dict(self.skipped),
            places=self.places,
            num_truncated=self.counts["truncated"],
            num_split=self.counts["split"],
            num_dropped=self.counts["dropped"],
            num_ended=ends.total(),
            end_of_turn=token if 2 * count > self.ends.total() else None,
            files=self.files,
            samples=[{"row": -row} | sample for _, row, sample in sorted(self.samples, reverse=True)],
        )

    def _refuse(self) -> None:
        """InputError with the first place and the number of each kind of problem, unless they may be skipped."""
        bad = self.skipped.total()
        problems = [
            f"{self.places[reason]}: {reason}{f' ({n:,} rows)' if n > 1 else ''}" for reason, n in self.skipped.most_common()
        ]
        if bad and self.config.invalid_rows == "error":
            raise InputError("\n".join(problems))
        if self.num_rows == 0 and not bad:
            raise InputError(f"{self.files[0]}: holds no rows; write one JSON object a line")
        if bad > self.config.max_skipped_fraction * self.num_read:
            share = f"{bad:,} of {self.num_read:,} rows cannot be trained on, more than data.max_skipped_fraction allows"
            raise InputError("\n".join([*problems, f"{share} ({self.config.max_skipped_fraction}); mend them"]))
