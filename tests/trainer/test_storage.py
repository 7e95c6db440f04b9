"""A folder and a bucket behave alike, and a run may live in either."""

from pathlib import Path

import pytest
from processes import run_processes
from servers import s3_config
from tiny import settings
from training import run_training

from trainer.config import InputError, StorageConfig
from trainer.model import fetch_model
from trainer.storage import LocalStorage, S3Storage, Storage, check_writable, open_storage


@pytest.fixture(params=["folder", "bucket", "bucket root"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return open_storage(str(tmp_path / "storage"), StorageConfig())
    endpoint = request.getfixturevalue("s3_endpoint")
    prefix = f"/{tmp_path.name}//run/" if request.param == "bucket" else ""
    return open_storage(f"s3://runs{prefix}", StorageConfig(**s3_config(endpoint)))


def test_what_is_written_is_read_listed_and_deleted(storage: Storage) -> None:
    assert storage.write("a/one", b"1")
    assert storage.write("a/b/two", b"22")
    storage.write("a/one", b"one")
    assert storage.read("a/one") == b"one"
    assert storage.list("a") == {"a/one": 3, "a/b/two": 2}
    with storage.local_copy("a/b/two") as path:
        assert path.read_bytes() == b"22"
    before = storage.version("a/b/two")
    storage.write("a/b/two", b"23")
    assert storage.version("a/b/two") != before
    storage.delete(["a/one", "a/b/two", "a/never"])
    assert not storage.list().keys() & {"a/one", "a/b/two"}
    assert storage.list("a") == {}


def test_a_missing_key_is_file_not_found_and_an_empty_prefix_lists_nothing(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    assert storage.list("nothing") == {}


def test_only_the_first_of_two_conditional_writes_wins(storage: Storage) -> None:
    assert storage.write("owner", b"me", if_absent=True)
    assert not storage.write("owner", b"you", if_absent=True)
    assert storage.read("owner") == b"me"
    storage.delete(["owner"])


def test_files_go_up_and_come_down(storage: Storage, tmp_path: Path) -> None:
    data = bytes(range(256)) * 80_000  # more than one part of a multipart upload
    (tmp_path / "big").write_bytes(data)
    storage.upload(tmp_path / "big", "x/big")
    storage.download("x/big", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == data
    storage.delete(["x/big"])


def test_slashes_in_a_uri_do_not_become_part_of_keys(s3_endpoint: str) -> None:
    made = S3Storage("s3://runs//a//b/", StorageConfig(**s3_config(s3_endpoint)))
    assert made.uri == "s3://runs/a/b"
    made.write("key", b"x")
    assert S3Storage("s3://runs", StorageConfig(**s3_config(s3_endpoint))).list("a") == {"a/b/key": 1}


def test_an_unwritable_place_is_refused_with_its_reason(tmp_path: Path, s3_endpoint: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"storage\.uri: cannot write to .*/file/runs \(Not a directory\)"):
        check_writable(LocalStorage(str(tmp_path / "file" / "runs")))
    with pytest.raises(InputError, match=r"storage\.uri: cannot write to s3://nobucket .*NoSuchBucket"):
        check_writable(S3Storage("s3://nobucket", StorageConfig(**s3_config(s3_endpoint))))


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    class Careless(LocalStorage):
        def write(self, key: str, data: bytes, if_absent: bool = False, if_version: str | None = None) -> bool:
            return super().write(key, data)

    with pytest.raises(InputError, match="use a store with conditional writes"):
        check_writable(Careless(str(tmp_path)))


def test_a_key_is_replaced_only_where_it_is_still_the_version_that_was_read(storage: Storage) -> None:
    storage.write("owner", b"a")
    data, version = storage.read_version("owner")
    assert data == b"a"
    assert storage.write("owner", b"b", if_version=version)
    assert not storage.write("owner", b"c", if_version=version)
    assert storage.read("owner") == b"b"
    assert not storage.write("nothing", b"c", if_version=version)
    storage.delete(["owner"])


def test_large_content_goes_up_in_parts_without_a_copy(storage: Storage) -> None:
    data = bytes(range(256)) * (40 * 2**12)
    assert not storage.write_large("big", [memoryview(data[:5]), memoryview(data)[5:]])
    with storage.local_copy("big") as path:
        assert path.read_bytes() == data
    storage.delete(["big"])


def test_a_run_goes_from_s3_to_s3_and_resumes_there(tmp_path: Path, s3_endpoint: str) -> None:
    local = settings(tmp_path)
    bucket = open_storage(f"s3://runs/{tmp_path.name}", StorageConfig(**s3_config(s3_endpoint)))
    for file in (tmp_path / "model").iterdir():
        bucket.upload(file, f"model/{file.name}")
    for name in ("train.jsonl", "eval.jsonl"):
        bucket.upload(tmp_path / name, name)
    values = local | {
        "storage": s3_config(s3_endpoint) | {"uri": f"{bucket.uri}/runs"},
        "model": {"path": f"{bucket.uri}/model"},
        "data": local["data"] | {"train": f"{bucket.uri}/train.jsonl", "eval": f"{bucket.uri}/eval.jsonl"},
    }
    parts = [run_processes(2, run_training, values, stop)[0] for stop in (2, None)]
    assert [part["ending"] for part in parts] == ["interrupted", "complete"]
    assert [row["step"] for row in parts[1]["rows"] if "loss" in row] == [5, 6, 7, 8]
    keys = bucket.list("runs")
    names = {key.split("/", 2)[2] for key in keys}
    assert {"model/model.safetensors", "model/config.json", "metrics.jsonl", "run.json"} <= names
    assert not any("tmp" in name or "probe" in name for name in names)


def test_an_s3_folder_without_weights_is_refused(tmp_path: Path, s3_endpoint: str) -> None:
    import tiny

    bucket = open_storage(f"s3://runs/{tmp_path.name}", StorageConfig(**s3_config(s3_endpoint)))
    bucket.write("model/config.json", b"{}")
    made = tiny.config(tmp_path, model={"path": f"{bucket.uri}/model"}, storage=s3_config(s3_endpoint))
    with pytest.raises(InputError, match=r"model\.path: s3://runs/.*/model holds no \*\.safetensors weights"):
        fetch_model(made, weights=False)
    empty = tiny.config(tmp_path, model={"path": f"{bucket.uri}/none"}, storage=s3_config(s3_endpoint))
    with pytest.raises(InputError, match=r"model\.path: s3://runs/.*/none is empty"):
        fetch_model(empty, weights=False)
