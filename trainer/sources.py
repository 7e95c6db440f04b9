"""Where rows come from: files and globs, local or in S3, and Hugging Face datasets, read in pieces of bounded size.

`datasets` only resolves which files make up a split; every row is read here, so that each has a file and a line, and
the same row gives the same tokens whatever its framing.
"""

import contextlib
import fnmatch
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainer.config import InputError, SourceConfig, StorageConfig, refusing
from trainer.storage import LocalStorage, open_storage

FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PIECE_BYTES = 2**20  # of lines
PIECE_ROWS = 1000  # of a table
LONGEST_LINE = 64 * 2**20
BESIDE_ROWS = ("dataset_info", "dataset_dict.json", "state.json")
SPLITS = {  # words of file names, as `datasets` reads them
    "train": ("train", "training"),
    "valid": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
HINT = "give files that end in .jsonl or .json (also with .gz or .zst) or .parquet, or a Hugging Face dataset"


@dataclass(frozen=True)
class DataFile:
    """One file of rows. `version` tells whether its content is the same: a SHA-256, an ETag or a commit."""

    name: str
    version: str
    source: int


@dataclass(frozen=True)
class Piece:
    """Rows that follow one another in a file, the first of them at line (or row) `first`: lines, or a pyarrow table's rows."""

    file: int
    first: int
    rows: Any


class Source:
    """The files of one configured source."""

    def __init__(self, config: SourceConfig, number: int, storage: StorageConfig, key: str, revision: str | None = None):
        self.config, self.number, self.storage, self.key = config, number, storage, key
        self.revision = revision or config.revision
        names = self._find()
        unknown = [name for name in names if _format(name)[0] is None]
        if not names or unknown:
            what = f"{config.path} holds {unknown[0].rpartition('/')[2]}" if unknown else f"there is nothing at {config.path}"
            raise InputError(f"{key}: {what}; {HINT}")
        self.files = [DataFile(name, self._version(name), number) for name in names]

    def _find(self) -> list[str]:
        path = self.config.path
        if path.startswith("s3://"):
            return self._without_splits(self._find_in_s3(path))
        if "://" in path:
            raise InputError(
                f"{self.key}: {path}: rows are read from local paths, s3:// and Hugging Face datasets; copy them there"
            )
        local = Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such user
        if local.is_file():
            return self._without_splits([str(local)])
        if local.is_dir():
            return _saved_dataset(local, self.config.split) or self._find_in_folder(local)
        if any(character in path for character in "*?["):
            names = [name for name in glob.glob(str(local), recursive=True) if Path(name).is_file()]
            return self._without_splits(_with_rows(sorted(names)) or names)
        if path.startswith((".", "/", "~")) or path.count("/") > 1 or _format(path)[0]:
            raise InputError(f"{self.key}: {path}: No such file or directory; {HINT}")
        return self._find_in_hub()

    def _without_splits(self, names: list[str]) -> list[str]:
        """InputError where a split of files is asked for that have none."""
        if self.config.split != "train":
            raise InputError(
                f"{self.key}: {self.config.path} is no dataset with splits, so that split {self.config.split} means nothing; remove it"
            )
        return names

    def _find_in_folder(self, folder: Path) -> list[str]:
        """The split of a folder that is laid out as a dataset; of any other folder all files with rows."""
        names = _with_rows(sorted(str(path) for path in folder.rglob("*") if path.is_file()))
        if _describes_dataset(folder):
            return self._find_in_dataset(str(folder))
        if not _splits(name.removeprefix(str(folder)) for name in names):
            return self._without_splits(names)
        return self._find_in_dataset(str(folder), names)

    def _find_in_s3(self, path: str) -> list[str]:
        bucket, _, pattern = path.removeprefix("s3://").partition("/")
        with refusing(f"{self.key}: {path} cannot be read", "give a path that this run's credentials may read"):
            if _format(path)[0] and self._is_object(path):
                return [path]
            folder = pattern.strip("/")
            names = self._list_s3(bucket, folder)
            if not names and any(character in pattern for character in "*?["):
                folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
                inside = pattern.removeprefix(folder).strip("/").split("/")
                names = [name for name in self._list_s3(bucket, folder) if _matches(inside, name.split("/"))]
                return self._in_s3(bucket, folder, _with_rows(names) or names)
        if len(splits := sorted(_splits(names := _with_rows(names)))) > 1:
            raise InputError(
                f"{self.key}: {path} holds files of {' and '.join(splits)}; write a glob such as {path.rstrip('/')}/train*"
            )
        return self._in_s3(bucket, folder, names)

    def _in_s3(self, bucket: str, folder: str, names: list[str]) -> list[str]:
        return [f"s3://{'/'.join(filter(None, (bucket, folder, name)))}" for name in sorted(names)]

    def _is_object(self, path: str) -> bool:
        folder, _, key = path.rpartition("/")
        try:
            return bool(open_storage(folder, self.storage).version(key))
        except FileNotFoundError:
            return False

    def _list_s3(self, bucket: str, folder: str) -> list[str]:
        return list(open_storage(f"s3://{bucket}/{folder}".rstrip("/"), self.storage).list())

    def _find_in_dataset(self, path: str, present: list[str] | None = None, **options: Any) -> list[str]:
        """The files of the split; InputError where one of those `present` belongs to no split."""
        from datasets import disable_progress_bars, load_dataset_builder

        disable_progress_bars()
        with refusing(f"{self.key}: {path} cannot be read as a Hugging Face dataset", "check path, name and revision"):
            files = load_dataset_builder(path, self.config.name, **options).config.data_files or {}
        if self.config.split not in files:
            known = ", ".join(sorted(map(str, files))) or "none"
            raise InputError(f"{self.key}: {path} has no split {self.config.split}; its splits are {known}")
        in_splits = {os.path.realpath(name) for names in files.values() for name in names}
        if left_out := [name for name in present or () if os.path.realpath(name) not in in_splits]:
            raise InputError(
                f"{self.key}: {left_out[0]} belongs to no split; give a glob of the files to read, or move it out of {path}"
            )
        return sorted(files[self.config.split])

    def _find_in_hub(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

        path = self.config.path
        try:
            # Pinned here, so that every file and every later attempt is of one commit.
            self.revision = HfApi().dataset_info(path, revision=self.revision).sha
        except (RepositoryNotFoundError, RevisionNotFoundError):
            at = f" at {self.revision}" if self.revision else ""
            raise InputError(
                f"{self.key}: {path} is no local path, and the Hub has no such dataset{at}; check both, and HF_TOKEN"
            ) from None
        except (HfHubHTTPError, OSError, ValueError):
            raise InputError(
                f"{self.key}: {path} is no local path, and the Hub did not give it; check the path and the network"
            ) from None
        return self._find_in_dataset(path, revision=self.revision)

    def _version(self, name: str) -> str:
        if name.startswith("hf://"):
            return str(self.revision)
        if name.startswith("s3://"):
            folder, _, key = name.rpartition("/")
            with refusing(f"{self.key}: {name} cannot be read", "give an object that this run's credentials may read"):
                return open_storage(folder, self.storage).version(key)
        return LocalStorage(".").version(name)

    # ---- reading ----

    def pieces(self, file: DataFile, number: int) -> Iterator[Piece]:
        """The rows of `file`, which is number `number` of its data set."""
        form, compression = _format(file.name)
        with refusing(f"{file.name}: cannot be read", f"{HINT}, and check that it is whole"), self._open(file) as stream:
            if form == ".parquet":
                yield from _table_pieces(_parquet(stream), number)
            elif form == ".arrow":
                yield from _table_pieces(_arrow(stream), number)
            else:
                yield from _line_pieces(file.name, _decompressed(stream, compression), number)

    @contextlib.contextmanager
    def _open(self, file: DataFile) -> Iterator[IO[bytes]]:
        name = file.name
        if name.startswith("hf://"):
            from huggingface_hub import hf_hub_download

            inside = name.partition("@")[2].partition("/")[2]
            name = hf_hub_download(self.config.path, inside, repo_type="dataset", revision=self.revision)
        folder, _, key = name.rpartition("/")
        storage = (
            open_storage(folder, self.storage)
            if name.startswith("s3://")
            else LocalStorage(folder or ("/" if name.startswith("/") else "."))
        )
        with storage.local_copy(key) as path, path.open("rb") as stream:
            yield stream


def _format(name: str) -> tuple[str | None, str | None]:
    """The ending that says how rows are written, and the compression; (None, None) for a file that holds no rows."""
    path = Path(name)
    compression = COMPRESSIONS.get(path.suffix.lower())
    ending = (path.with_suffix("") if compression else path).suffix.lower()
    return (ending, compression) if ending in FORMATS and not (compression and ending in (".parquet", ".arrow")) else (None, None)


def _with_rows(names: list[str]) -> list[str]:
    """Those that hold rows by their ending; hidden ones and what `datasets` writes beside rows do not."""
    return [name for name in names if _format(name)[0] and not Path(name).name.startswith((".", *BESIDE_ROWS))]


def _splits(names: Iterable[str]) -> set[str]:
    """The splits that whole words of the names speak of."""
    words = {word for name in names for word in re.split(r"[^a-z]+", name.lower())}
    return {split for split, spellings in SPLITS.items() if words & set(spellings)}


def _describes_dataset(folder: Path) -> bool:
    """Whether a README says in its header which files make up which configuration."""
    readme = folder / "README.md"
    return readme.is_file() and bool(re.match(r"---\n(.*\n)*?configs:", readme.read_text(encoding="utf-8", errors="replace")))


def _matches(pattern: list[str], parts: list[str]) -> bool:
    """Whether a key's parts match a glob's: as in a shell, * stays within a folder, and ** spans any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _saved_dataset(folder: Path, split: str) -> list[str]:
    """The files of a dataset that `save_to_disk` wrote, none where it is not one."""
    if (folder / "dataset_dict.json").is_file():
        folder = folder / split
    if not (folder / "state.json").is_file():
        return []
    state = json.loads((folder / "state.json").read_text())
    return [str(folder / file["filename"]) for file in state["_data_files"]]


def _decompressed(stream: Any, compression: str | None) -> Any:
    if compression is None:
        return stream
    import io

    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(stream, compression), PIECE_BYTES)  # pyright: ignore[reportArgumentType]


def _line_pieces(name: str, stream: Any, number: int) -> Iterator[Piece]:
    first, lines, size = 1, [], 0
    for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
        if len(line) == LONGEST_LINE:
            raise InputError(
                f"{name}:{first + len(lines)}: a line is longer than {LONGEST_LINE >> 20} MiB; write one JSON object a line"
            )
        if first == 1 and not lines:
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.lstrip()[:1] == b"[":
                raise InputError(f"{name}:1: a JSON array; write one JSON object a line (jq -c '.[]' does)")
        lines.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            yield Piece(number, first, lines)
            first, lines, size = first + len(lines), [], 0
    if lines:
        yield Piece(number, first, lines)


def _table_pieces(batches: Iterator[Any], number: int) -> Iterator[Piece]:
    first = 1
    for batch in batches:
        count = _rows_of_a_piece(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, count):
            part = batch.slice(start, count)
            if part.num_rows < batch.num_rows:
                part = part.take(list(range(part.num_rows)))  # a slice would take the whole batch along to another process
            yield Piece(number, first, part)
            first += part.num_rows


def _rows_of_a_piece(rows: int, size: int) -> int:
    return max(1, min(PIECE_ROWS, rows * PIECE_BYTES // max(1, size)))


def _parquet(stream: Any) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(stream, memory_map=False, pre_buffer=False)
    groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
    return file.iter_batches(_rows_of_a_piece(file.metadata.num_rows, sum(group.total_byte_size for group in groups)))


def _arrow(stream: Any) -> Iterator[Any]:
    from pyarrow import ipc

    return iter(ipc.open_stream(stream))


def raw_rows(piece: Piece) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(line, JSON text or values) of each row of a piece, blank lines left out."""
    if isinstance(piece.rows, list):
        for offset, line in enumerate(piece.rows):
            if line := line.strip():
                yield piece.first + offset, line
        return
    for offset, values in enumerate(piece.rows.to_pylist()):
        # A table cannot tell an absent key of an object from a null, so that there a null is an absent key.
        yield piece.first + offset, _without_nulls(values)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
