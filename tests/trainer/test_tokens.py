"""The token store: what becomes of a data set's rows, counted, and written so that nobody reads half of it."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_processes
from stores import TOKENIZER, build, chat, data_config, encode, write_lines
from tiny import WORDS, build_tokenizer, write_rows

import trainer.tokens as module
from trainer.config import InputError, RunError, StorageConfig, TrainerConfig
from trainer.encoding import Encoder
from trainer.inputs import describe
from trainer.sources import Source
from trainer.storage import LocalStorage
from trainer.tokens import COLUMNS, build_store, contamination, find_index, held_out_rows, store_key

GOOD = chat(("user", "red"), ("assistant", "blue stone"))
LONG = chat(("user", "a"), ("assistant", " ".join(WORDS * 2)))
LATE = chat(("user", " ".join(WORDS * 2)), ("assistant", "a"))


def test_all_kinds_of_problems_are_listed_once_with_their_number_and_first_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [chat(("user", "a")), GOOD, chat(("user", "b")), {"x": 1}])
    with path.open("a") as file:
        file.write('{"messages": [\n')
    with pytest.raises(InputError) as refused:
        build(data_config(path))
    first, second, third = str(refused.value).splitlines()
    assert first.startswith(f"{path}:1: no turn of assistant to learn from")
    assert first.endswith("(2 rows)")
    assert second.startswith(f"{path}:4: no messages, prompt with completion, or text (it has x)")
    assert third.startswith(f"{path}:5: not valid JSON")


def test_invalid_rows_are_skipped_where_asked_and_counted_up_to_a_ceiling(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD] * 8 + [chat(("user", "a"))] * 2)
    index, tokens = build(data_config(path, invalid_rows="skip", max_skipped_fraction=0.2))
    assert (len(tokens), index.num_read, list(index.skipped.values())) == (8, 10, [2])
    assert list(index.places.values()) == [f"{path}:9"]
    with pytest.raises(
        InputError, match=r"2 of 10 rows cannot be trained on, more than data\.max_skipped_fraction allows \(0\.19\)"
    ):
        build(data_config(path, invalid_rows="skip", max_skipped_fraction=0.19))


def test_a_long_row_is_refused_truncated_or_split_and_never_loses_all_supervision(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD, LONG, LATE])
    whole = [encode(row) for row in (GOOD, LONG, LATE)]
    with pytest.raises(InputError, match=r"rows\.jsonl:2: longer than data\.sequence_length \(32 tokens\).*\(2 rows\)"):
        build(data_config(path, sequence_length=32))
    with pytest.raises(InputError, match=r"rows\.jsonl:3: no supervised token that can be predicted within data\.sequence_length"):
        build(data_config(path, sequence_length=32, long_rows="truncate"))

    index, cut = build(data_config(path, sequence_length=32, long_rows="truncate", invalid_rows="skip", max_skipped_fraction=0.5))
    assert cut.lengths.tolist() == [len(whole[0].ids), 32]
    assert (index.num_truncated, sum(index.skipped.values())) == (1, 1)
    assert cut.ids[-32:].tolist() == whole[1].ids[:32].tolist()

    index, split = build(data_config(path, sequence_length=32, long_rows="split"))
    assert index.num_split == 2
    pieces = [split[row][0].tolist() for row in range(len(split)) if split.lines[row] == 2]
    assert [token for piece in pieces for token in piece] == whole[1].ids.tolist()
    kept = sum(len(split[row][0]) for row in range(len(split)) if split.lines[row] == 3)
    assert index.num_dropped == -(-(len(whole[2].ids) - kept) // 32) > 0
    assert all(split.labels > 0)


def test_a_rows_place_source_and_weight_are_kept(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", [GOOD, GOOD | {"weight": 3}])
    second = write_lines(tmp_path / "b.jsonl", [LONG])
    values = data_config(first).model_dump()
    values["data"]["train"] = [str(first), {"path": str(second), "weight": 2}]
    index, tokens = build(TrainerConfig.model_validate(values))
    assert tokens.sources.tolist() == [0, 0, 1]
    assert [index.files[file] for file in tokens.files] == [str(first), str(first), str(second)]
    assert tokens.lines.tolist() == [1, 2, 1]
    assert tokens.weights.tolist() == [1, 3, 1]


def test_pieces_of_a_row_stay_on_one_side_ask_one_sample_and_share_its_prompt(tmp_path: Path) -> None:
    rows = [chat(("user", f"q{i}"), ("assistant", " ".join(WORDS[(7 * i + j) % 20] for j in range(60)))) for i in range(12)]
    index, tokens = build(data_config(write_lines(tmp_path / "rows.jsonl", rows), sequence_length=32, long_rows="split"))
    assert len(tokens) > 2 * len(rows)
    held_out = held_out_rows(tokens, 0.3)
    assert not set(tokens.lines[held_out].tolist()) & set(tokens.lines[~held_out].tolist())
    assert len({sample["messages"][-1]["content"] for sample in index.samples}) == len(index.samples) == len(rows)
    assert len(set(tokens.prompts.tolist())) == len(rows)
    assert index.end_of_turn == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    other = [chat(("user", "other"), ("assistant", " ".join(WORDS * 3)))]
    _, measured = build(data_config(write_lines(tmp_path / "eval.jsonl", other), sequence_length=32, long_rows="split"))
    assert contamination(tokens, measured) == (0, 0)


def test_a_set_of_which_no_row_ends_with_a_special_token_says_that_no_end_of_turn_is_learnt(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    config = data_config(write_lines(tmp_path / "rows.jsonl", [GOOD]))
    sentence = "no row's learnt part ends with a special token, so no end-of-turn is learnt"
    assert sentence in describe("train", build(config, tokenizer)[0], config)
    assert sentence not in describe("train", build(config)[0], config)


def test_a_set_is_described_with_its_file_or_their_number(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    config = data_config(str(write_lines(folder / "a.jsonl", [GOOD])))
    config = config.model_copy(update={"storage": StorageConfig(uri=str(tmp_path / "runs"))})
    assert describe("train", build(config)[0], config).startswith(f"train: {folder}/a.jsonl: 1 rows, ")
    write_lines(folder / "b.jsonl", [GOOD])
    config = config.model_copy(update={"data": data_config(folder).data})
    assert describe("train", build(config)[0], config).startswith("train: 2 files: 2 rows, ")


def test_the_end_of_turn_is_what_most_rows_end_with(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD, GOOD, {"text": "red"}])
    index, _ = build(data_config(path))
    assert index.end_of_turn == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert TOKENIZER.eos_token == "<|endoftext|>"


def test_many_rows_come_out_the_same_by_processes_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 300)
    here, _ = build(data_config(path))
    monkeypatch.setattr("trainer.sources.PIECE_BYTES", 2000)
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    started: list[int] = []
    real = module.ProcessPoolExecutor

    def executor(*arguments: Any) -> Any:
        started.append(arguments[0])
        return real(*arguments)

    monkeypatch.setattr(module, "ProcessPoolExecutor", executor)
    there, _ = build(data_config(path).model_copy(update={"storage": StorageConfig(uri=str(tmp_path / "other"))}))
    assert started == [2]
    assert there.columns == here.columns


@pytest.fixture
def parts(tmp_path: Path) -> tuple[TrainerConfig, list[Source], LocalStorage, str]:
    config = data_config(write_rows(tmp_path / "rows.jsonl", 20))
    sources = [Source(config.data.train[0], 0, config.storage, "data.train")]
    return config, sources, LocalStorage(f"{config.storage.uri}/tokens"), store_key(sources, TOKENIZER, config.data)


def test_a_store_without_all_its_columns_does_not_exist_and_is_built_anew(parts: Any) -> None:
    config, sources, storage, key = parts
    index, _ = build(config)
    assert find_index(storage, key) == index
    storage.delete([f"{key}/{index.columns['ids']}"])
    assert find_index(storage, key) is None
    build_store(sources, Encoder(TOKENIZER, config.data), config.data, storage, key, print)
    assert find_index(storage, key) == index
    storage.write(f"{key}/index.json", b"{half")
    assert find_index(storage, key) is None
    build_store(sources, Encoder(TOKENIZER, config.data), config.data, storage, key, print)
    assert find_index(storage, key) == index


def test_a_store_with_a_column_of_another_size_is_built_anew(parts: Any) -> None:
    config, sources, storage, key = parts
    index, _ = build(config)
    for column in ("ids", "lengths"):
        path = storage.root / key / index.columns[column]
        path.write_bytes(path.read_bytes()[:-4])
        assert find_index(storage, key) is None
        build_store(sources, Encoder(TOKENIZER, config.data), config.data, storage, key, print)
        assert find_index(storage, key) == index


def kill_oneself(piece: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    monkeypatch.setattr("trainer.sources.PIECE_BYTES", 2000)
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    return data_config(write_rows(tmp_path / "rows.jsonl", 600))


def test_a_tokenising_process_that_is_killed_ends_the_run_in_one_sentence(
    many_pieces: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_encode_there", kill_oneself)
    with pytest.raises(RunError, match="a tokenising process was killed, most often for lack of memory; "):
        build(many_pieces)


def build_slowly(values: dict[str, Any]) -> None:
    module.usable_cpus = lambda: 2
    real = module._Writer.add

    def add(self: Any, batch: Any) -> None:
        print("batch", flush=True)
        time.sleep(0.2)
        real(self, batch)

    module._Writer.add = add
    build(TrainerConfig.model_validate(values))


def test_tokenising_processes_end_with_the_one_that_started_them(many_pieces: TrainerConfig) -> None:
    write_rows(Path(many_pieces.data.train[0].path), 100_000)
    code = f"import test_tokens; test_tokens.build_slowly({many_pieces.model_dump()!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parent, start_new_session=True
    )
    try:
        assert process.stdout
        assert b"batch\n" in iter(process.stdout.readline, b"")
        assert len(members(process.pid)) > 2
        process.kill()
        process.wait()
        until = time.monotonic() + 10
        while members(process.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert members(process.pid) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_what_a_killed_process_left_behind_is_removed_and_a_living_ones_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    code = "import trainer.tokens\nwith trainer.tokens._scratch_folder() as folder: print(folder, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(scratch)}
    )
    try:
        assert process.stdout
        left = Path(process.stdout.readline().decode().strip())
        config = data_config(write_rows(tmp_path / "rows.jsonl", 20))
        build(config)
        assert list(scratch.iterdir()) == [left]
    finally:
        process.kill()
        process.wait()
    assert left.is_dir()
    build(config)
    assert list(scratch.iterdir()) == []


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            found += [int(status.parent.name)] if int(fields[3]) == session and fields[0] != "Z" else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_tokenising_between_two_pieces_and_leaves_nothing_behind(
    many_pieces: TrainerConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    seen: list[int] = []
    batches: list[Any] = []
    before = signal.signal(number, lambda signum, frame: seen.append(signum))

    def add(self: Any, batch: Any) -> None:
        batches.append(batch)
        if len(batches) == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(module._Writer, "add", add)
    try:
        with pytest.raises(module.Stopped):
            build(many_pieces)
        handler = signal.getsignal(number)
    finally:
        signal.signal(number, before)
    assert (seen, len(batches), list(scratch.iterdir())) == ([number], 2, [])
    assert callable(handler)
    assert multiprocessing.active_children() == []


def test_jobs_that_build_the_same_store_at_once_all_end_with_one_whole_store(tmp_path: Path) -> None:
    config = data_config(write_rows(tmp_path / "rows.jsonl", 50))
    indexes = run_processes(3, build_here, config.model_dump())
    assert indexes[0] == indexes[1] == indexes[2]
    [folder] = (tmp_path / "runs" / "tokens").iterdir()
    assert {path.name for path in folder.iterdir()} == {"index.json", *json.loads(indexes[0])["columns"].values()}


def build_here(values: dict[str, Any]) -> str:
    return build(TrainerConfig.model_validate(values))[0].model_dump_json()


@pytest.mark.parametrize(
    "changes",
    [{"sequence_length": 64}, {"last_turn_only": True}, {"supervised_roles": ["user"]}, {"long_rows": "split"}],
)
def test_another_treatment_is_another_store_and_another_name_or_weight_is_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 5)

    def key(**data: Any) -> str:
        config = data_config(path, **data)
        return store_key([Source(config.data.train[0], 0, config.storage, "data.train")], TOKENIZER, config.data)

    assert key() == key(version="2", eval_fraction=0.5) != key(**changes)


# ---- held-out rows ----


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=200), st.floats(0.01, 0.99))
def test_rows_held_out_by_fraction_share_none_of_their_content_with_the_rest(hashes: list[int], fraction: float) -> None:
    values = np.array(hashes, np.uint64)
    rows = {name: np.zeros(len(values), dtype) for name, dtype in COLUMNS.items()} | {"hashes": values}
    held_out = held_out_rows(module.Tokens(**rows), fraction)
    kept, out = set(values[~held_out].tolist()), set(values[held_out].tolist())
    assert not kept & out
    distinct = len(kept | out)
    assert kept
    if distinct > 1:
        assert len(out) == min(distinct - 1, max(1, round(fraction * distinct)))


def test_held_out_rows_and_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    other_answer = chat(("user", "red"), ("assistant", "cold"))
    train = write_lines(tmp_path / "train.jsonl", [GOOD, LONG, {"text": "north"}])
    held_out = write_lines(tmp_path / "eval.jsonl", [GOOD, other_answer, LATE, {"text": "south"}])
    _, trained = build(data_config(train))
    _, measured = build(data_config(held_out))
    assert contamination(trained, measured) == (1, 2)
