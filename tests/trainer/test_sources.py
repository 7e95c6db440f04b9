"""Where rows may lie and how they may be written: the same rows give the same tokens whatever the framing."""

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from stores import build, chat, data_config, write_lines

from trainer.config import InputError, SourceConfig, StorageConfig, TrainerConfig
from trainer.sources import Source
from trainer.storage import S3Storage
from trainer.tokens import Tokens

TOOLS = json.dumps([{"type": "function", "function": {"name": "é"}}])
ROWS: list[dict[str, Any]] = [
    chat(("user", "red"), ("assistant", "blue stone")),
    chat(("system", "é"), ("user", "a"), ("assistant", "ü b"), weight=2.0),
    {"prompt": "red:", "completion": " blue"},
    {"text": "seven\r\napples"},
    chat(("user", "north"), ("assistant", "south"), ("user", "cold"), ("assistant", "warm")),
]


def columns(tokens: Tokens) -> list[Any]:
    return [tokens.ids.tolist(), tokens.supervised.tolist(), tokens.lengths.tolist(), tokens.weights.tolist()]


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PLAIN = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
SWAPPED = [{"messages": [dict(reversed(m.items())) for m in row["messages"]]} | row if "messages" in row else row for row in ROWS]
WIDE = [{"messages": None, "prompt": None, "completion": None, "text": None} | row for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("last line ended", PLAIN + b"\n"),
        ("byte order mark", b"\xef\xbb\xbf" + PLAIN),
        ("carriage returns", PLAIN.replace(b"\n", b"\r\n")),
        ("blank lines", b"\n" + PLAIN.replace(b"\n", b"\n\n \r\n") + b"\n\n"),
        ("escaped", "\n".join(map(json.dumps, ROWS)).encode()),
        ("keys in another order", "\n".join(map(json.dumps, SWAPPED)).encode()),
        ("nulls first", "\n".join(map(json.dumps, WIDE)).encode()),
        ("rows.jsonl.gz", gzip.compress(PLAIN)),
        ("two members.jsonl.gz", gzip.compress(PLAIN[:50]) + gzip.compress(PLAIN[50:])),
        ("rows.jsonl.zst", zstd(PLAIN)),
        ("rows.json", PLAIN),
    ],
)
def test_the_same_rows_give_the_same_tokens_whatever_their_framing(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "plain.jsonl").write_bytes(PLAIN)
    _, plain = build(data_config(tmp_path / "plain.jsonl"))
    path = tmp_path / (name if ".json" in name else f"{name}.jsonl")
    path.write_bytes(content)
    _, framed = build(data_config(path))
    assert columns(framed) == columns(plain)


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(
        [{"messages": None, "prompt": None, "completion": None, "text": None, "weight": None} | r for r in rows]
    )


def write_parquet(folder: Path) -> str:
    parquet.write_table(as_table(ROWS), folder / "rows.parquet", row_group_size=2)
    return str(folder / "rows.parquet")


def write_saved_dataset(folder: Path) -> str:
    datasets.Dataset(as_table(ROWS)).save_to_disk(folder / "saved")
    return str(folder / "saved")


def write_saved_splits(folder: Path) -> str:
    splits = {"train": datasets.Dataset(as_table(ROWS)), "test": datasets.Dataset(as_table(ROWS[:1]))}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")  # pyright: ignore[reportArgumentType, reportCallIssue]
    return str(folder / "splits")


def write_dataset_folder(folder: Path) -> str:
    data = folder / "hub" / "data"
    data.mkdir(parents=True)
    parquet.write_table(as_table(ROWS[:3]), data / "train-00000-of-00002.parquet")
    parquet.write_table(as_table(ROWS[3:]), data / "train-00001-of-00002.parquet")
    parquet.write_table(as_table(ROWS[:1]), data / "test-00000-of-00001.parquet")
    return str(folder / "hub")


def write_glob(folder: Path) -> str:
    write_lines(folder / "part-0.jsonl", ROWS[:2])
    (folder / "part-1.jsonl.gz").write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in ROWS[2:])))
    write_lines(folder / "other.jsonl", ROWS)
    return str(folder / "part-*")


@pytest.mark.parametrize("write", [write_parquet, write_saved_dataset, write_saved_splits, write_dataset_folder, write_glob])
def test_tables_datasets_and_globs_give_the_tokens_of_the_same_rows_in_lines(tmp_path: Path, write: Callable[[Path], str]) -> None:
    (tmp_path / "plain.jsonl").write_bytes(PLAIN)
    _, plain = build(data_config(tmp_path / "plain.jsonl"))
    config = data_config(write(tmp_path)).model_copy(update={"storage": StorageConfig(uri=str(tmp_path / "runs"))})
    index, tokens = build(config)
    assert columns(tokens) == columns(plain)
    lines = [(index.files[file].rpartition("/")[2], int(line)) for file, line in zip(tokens.files, tokens.lines, strict=True)]
    assert len(set(lines)) == len(ROWS)


def test_another_split_of_a_dataset_is_read_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    path = write_dataset_folder(tmp_path)
    with_split = [{"path": path, "split": "test"}]
    config = TrainerConfig.model_validate(
        {"name": "a", "model": {"path": "m"}, "storage": {"uri": str(tmp_path / "runs")}, "data": {"train": with_split}}
    )
    assert build(config)[0].num_rows == 1
    with pytest.raises(InputError, match="has no split dev; its splits are test, train"):
        Source(config.data.train[0].model_copy(update={"split": "dev"}), 0, StorageConfig(), "data.train")


def test_files_globs_and_folders_in_s3_are_read_as_on_a_disk(tmp_path: Path, s3_endpoint: str) -> None:
    (tmp_path / "plain.jsonl").write_bytes(PLAIN)
    _, plain = build(data_config(tmp_path / "plain.jsonl"))
    storage = StorageConfig(uri="s3://runs/data-test", endpoint_url=s3_endpoint, path_style=True, region="us-east-1")
    store = S3Storage("s3://runs/rows", storage)
    store.write("train-0.jsonl", b"\n".join(json.dumps(row).encode() for row in ROWS[:2]))
    store.write("train-1.jsonl.gz", gzip.compress(b"\n".join(json.dumps(row).encode() for row in ROWS[2:])))
    store.write("deeper/train-2.jsonl", PLAIN)
    for path in ("s3://runs/rows/train-*", "s3://runs/rows/train-?.json*"):
        config = data_config(path).model_copy(update={"storage": storage})
        sources = [Source(config.data.train[0], 0, storage, "data.train")]
        assert [file.name.rpartition("/")[2] for file in sources[0].files] == ["train-0.jsonl", "train-1.jsonl.gz"]
    one = Source(data_config("s3://runs/rows/deeper").data.train[0], 0, storage, "data.train")
    assert [file.name for file in one.files] == ["s3://runs/rows/deeper/train-2.jsonl"]
    before = one.files[0].version
    store.write("deeper/train-2.jsonl", PLAIN + b"\n ")
    assert Source(one.config, 0, storage, "data.train").files[0].version != before
    pieces = [piece for number, file in enumerate(one.files) for piece in one.pieces(file, number)]
    assert len(pieces[0].rows) == len(ROWS) + 1
    assert len(plain) == len(ROWS)


def found(path: Path | str, storage: StorageConfig | None = None, **keys: Any) -> list[str]:
    """Names of a source's files."""
    config = SourceConfig(path=str(path), **keys)
    return [file.name.rpartition("/")[2] for file in Source(config, 0, storage or StorageConfig(), "data.train").files]


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')
    return folder


NAMES = (
    "a.jsonl",
    "deep/b.jsonl",
    "deep/er/c.JSONL.gz",
    "README.md",
    "_SUCCESS",
    "dataset_infos.json",
    ".hidden.jsonl",
    "latest.jsonl",
)


def test_a_folder_without_splits_is_read_whole_and_globs_reach_deeper_locally_and_in_s3(tmp_path: Path, s3_endpoint: str) -> None:
    storage = StorageConfig(uri="s3://runs/x", endpoint_url=s3_endpoint, path_style=True, region="us-east-1")
    local = put(tmp_path / "rows", *NAMES)
    for name in NAMES:
        S3Storage("s3://runs/whole", storage).write(name, b'{"text": "a"}')
    for place in (str(local), "s3://runs/whole"):
        assert sorted(found(place, storage)) == ["a.jsonl", "b.jsonl", "c.JSONL.gz", "latest.jsonl"]
        assert found(f"{place}/*", storage) == ["a.jsonl", "latest.jsonl"]
        assert found(f"{place}/**/*.jsonl", storage) == ["a.jsonl", "b.jsonl", "latest.jsonl"]
        assert sorted(found(f"{place}/deep/**", storage)) == ["b.jsonl", "c.JSONL.gz"]


def test_files_of_a_folder_with_splits_that_belong_to_none_are_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = put(tmp_path / "rows", "train.jsonl", "test.jsonl")
    for path in (folder, os.path.relpath(folder)):
        assert found(path) == ["train.jsonl"]
    put(folder, "extra.jsonl")
    with pytest.raises(InputError, match=r"extra\.jsonl belongs to no split; give a glob of the files to read, or move it"):
        found(folder)


def test_a_name_with_the_characters_of_a_glob_is_that_file(tmp_path: Path, s3_endpoint: str) -> None:
    storage = StorageConfig(uri="s3://runs/x", endpoint_url=s3_endpoint, path_style=True, region="us-east-1")
    folder = put(tmp_path / "rows [v1]", "a?.jsonl")
    S3Storage("s3://runs/rows [v1]", storage).write("a?.jsonl", b'{"text": "a"}')
    for place in (str(folder), "s3://runs/rows [v1]"):
        assert found(place, storage) == found(f"{place}/a?.jsonl", storage) == ["a?.jsonl"]


def test_a_split_is_refused_where_there_are_none(tmp_path: Path) -> None:
    folder = put(tmp_path / "rows", "a.jsonl")
    for path in (folder / "a.jsonl", folder, folder / "*"):
        with pytest.raises(InputError, match=r"is no dataset with splits, so that split test means nothing; remove it"):
            found(path, split="test")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_pieces_of_a_table_are_bounded_in_bytes_and_carry_no_more_than_their_rows(tmp_path: Path, form: str) -> None:
    table = pa.table({"text": [f"{i} " + "x" * 20_000 for i in range(300)]})
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(table, path, use_dictionary=False, compression="none")
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    source = Source(SourceConfig(path=str(path)), 0, StorageConfig(), "data.train")
    pieces = list(source.pieces(source.files[0], 0))
    assert max(len(pickle.dumps(piece)) for piece in pieces) < 2 * 2**20
    assert [piece.first for piece in pieces] == list(np.cumsum([1, *(piece.rows.num_rows for piece in pieces[:-1])]))
    assert sum(piece.rows.num_rows for piece in pieces) == 300


def test_an_s3_folder_that_mixes_splits_is_refused(s3_endpoint: str) -> None:
    storage = StorageConfig(uri="s3://runs/x", endpoint_url=s3_endpoint, path_style=True, region="us-east-1")
    store = S3Storage("s3://runs/mixed", storage)
    for name in ("train.jsonl", "test.jsonl"):
        store.write(name, PLAIN)
    store.delete(["test.jsonl"])
    for name in ("contest.jsonl", "latest.jsonl"):  # whole words only
        store.write(name, PLAIN)
    assert len(found("s3://runs/mixed", storage)) == 3
    store.write("test.jsonl", PLAIN)
    with pytest.raises(InputError, match=r"holds files of test and train; write a glob such as s3://runs/mixed/train\*"):
        Source(data_config("s3://runs/mixed").data.train[0], 0, storage, "data.train")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.csv", b"a,b\n", r"data\.train: .*rows\.csv holds rows\.csv; give files that end in \.jsonl"),
        ("rows.parquet", b"not a table", r"rows\.parquet: cannot be read \("),
        ("rows.jsonl.gz", gzip.compress(PLAIN)[:-20], r"rows\.jsonl\.gz: cannot be read \("),
        ("rows.jsonl.zst", b"not zstd at all", r"rows\.jsonl\.zst: cannot be read \("),
        ("rows.json", b'[{"text": "a"}]', r"rows\.json:1: a JSON array; write one JSON object a line"),
        ("rows.jsonl", b"", r"rows\.jsonl: holds no rows; write one JSON object a line"),
        ("rows.jsonl", b"\n \n", r"rows\.jsonl: holds no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence) as refused:
        build(data_config(tmp_path / name))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere.jsonl", "data.train: nowhere.jsonl: No such file or directory; give files that end in"),
        ("~nobody-of-this-name/a.jsonl", "data.train: ~nobody-of-this-name/a.jsonl: No such file or directory"),
        ("https://example.com/a.jsonl", "data.train: https://example.com/a.jsonl: rows are read from local paths, s3://"),
        ("./nowhere/*.jsonl", r"data.train: there is nothing at \./nowhere/\*\.jsonl"),
        ("org/nothing", "data.train: org/nothing is no local path, and the Hub did not give it"),
    ],
)
def test_a_path_with_nothing_at_it_is_refused(path: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=sentence):
        Source(data_config(path).data.train[0], 0, StorageConfig(), "data.train")


def test_a_line_longer_than_a_row_can_be_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sources.LONGEST_LINE", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(PLAIN + b"\n" + b"x" * 2000)
    with pytest.raises(InputError, match=r"rows\.jsonl:6: a line is longer than"):
        build(data_config(path))
