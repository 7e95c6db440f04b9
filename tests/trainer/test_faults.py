"""A store that is slow, overloaded, cut off or wants other credentials costs time, and no step; one that stays broken ends the run
with its reason and the last checkpoint whole."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from servers import BadLine, BadServer, bad_line, bad_server, s3_config, s3_server
from tiny import settings
from training import run_training

import trainer.storage as module
from trainer.checkpoint import find_checkpoints
from trainer.config import StorageConfig
from trainer.storage import DamagedError, LocalStorage, S3Storage, open_storage

MIB = 2**20
CONTENT = bytes(range(256)) * (40 * MIB // 256)  # three parts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.5)


@pytest.fixture
def server(s3_port: int) -> Iterator[BadServer]:
    with bad_server(s3_port) as made:
        yield made


@pytest.fixture
def line(s3_port: int) -> Iterator[BadLine]:
    with bad_line(s3_port) as made:
        yield made


def store(endpoint: str, folder: Path, patience: float = 120.0) -> S3Storage:
    made = open_storage(f"s3://runs/{folder.name}", StorageConfig(**s3_config(endpoint)), patience)
    assert isinstance(made, S3Storage)
    return made


def moved(storage: S3Storage, folder: Path) -> bool:
    """Whether content goes up and comes back as it was."""
    storage.write_large("big", [memoryview(CONTENT)])
    storage.download("big", folder / "copy")
    return (folder / "copy").read_bytes() == CONTENT


def storm(every: int, status: int, code: str, seconds: float = 6.0) -> Callable[[str, str], tuple[int, str] | None]:
    """Errors to all requests but each `every`-th, for so long."""
    end, count = time.monotonic() + seconds, [0]

    def trouble(method: str, path: str) -> tuple[int, str] | None:
        count[0] += 1
        return (status, code) if time.monotonic() < end and count[0] % every else None

    return trouble


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable"), (400, "RequestTimeout")]
)
def test_a_storm_of_errors_is_sat_out(server: BadServer, tmp_path: Path, status: int, code: str) -> None:
    storage = store(server.endpoint, tmp_path)
    server.trouble = storm(7, status, code)
    began = time.monotonic()
    assert moved(storage, tmp_path)
    assert time.monotonic() - began > 3
    assert storage.write("small", b"x")
    assert storage.list() == {"big": len(CONTENT), "small": 1}


@pytest.mark.parametrize("stream", ["upstream", "downstream"])
def test_connections_that_are_reset_in_the_middle_are_made_again(line: BadLine, tmp_path: Path, stream: str) -> None:
    storage = store(line.endpoint, tmp_path)
    line.toxic("limit_data", stream, toxicity=0.6, bytes=3 * MIB)
    clearing = threading.Timer(8, line.clear)
    clearing.start()
    assert moved(storage, tmp_path)
    clearing.cancel()


def test_a_server_that_is_gone_for_a_while_is_waited_for(line: BadLine, tmp_path: Path) -> None:
    storage = store(line.endpoint, tmp_path)
    line.cut()
    threading.Timer(5, line.cut, [False]).start()
    assert moved(storage, tmp_path)


def test_a_slow_line_is_slow_and_nothing_else(line: BadLine, tmp_path: Path) -> None:
    storage = store(line.endpoint, tmp_path)
    line.toxic("latency", "downstream", latency=300, jitter=200)
    line.toxic("bandwidth", "upstream", rate=8000)
    assert moved(storage, tmp_path)


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "InvalidArgument"), (501, "NotImplemented")])
def test_what_no_waiting_mends_is_told_at_once(server: BadServer, tmp_path: Path, status: int, code: str) -> None:
    storage = store(server.endpoint, tmp_path)
    server.trouble = lambda method, path: (status, code)
    began = time.monotonic()
    with pytest.raises(Exception, match=code):
        storage.write_large("big", [memoryview(CONTENT)])
    assert time.monotonic() - began < 20


def test_patience_ends_with_the_stores_reason_and_nothing_half_written(server: BadServer, tmp_path: Path) -> None:
    storage = store(server.endpoint, tmp_path, patience=3)
    server.trouble = lambda method, path: (503, "SlowDown") if "partNumber=2" in path else None
    with pytest.raises(Exception, match="SlowDown"):
        storage.write_large("big", [memoryview(CONTENT)])
    assert storage.list() == {}
    assert storage.client.list_multipart_uploads(Bucket="runs", Prefix=tmp_path.name).get("Uploads", []) == []


def test_content_that_rotted_in_the_store_is_told_at_once(s3_port: int, tmp_path: Path) -> None:
    with s3_server(tmp_path / "s3") as port:
        storage = store(f"http://127.0.0.1:{port}", tmp_path)
        storage.write("small", b"abc")
        (tmp_path / "s3" / "runs" / tmp_path.name / "small").write_bytes(b"abd")
        with pytest.raises(DamagedError, match="does not have the checksum that it was stored with"):
            storage.read("small")


@pytest.fixture(params=["file", "container"])
def renewed(
    request: pytest.FixtureRequest, server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Gives out a new token, by a credentials file that is rewritten, or as EKS Pod Identity does; the old one has expired."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    server.tokens = True
    path = tmp_path / "credentials"
    if request.param == "file":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    else:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.endpoint}/credentials")

    def renew(token: str) -> None:
        secret = "aws_access_key_id = test\naws_secret_access_key = testsecret"
        path.write_text(f"[default]\n{secret}\naws_session_token = {token}\n")
        server.token = token

    renew("first")
    return renew


def test_credentials_that_expire_are_renewed(server: BadServer, tmp_path: Path, renewed: Callable[[str], None]) -> None:
    storage = store(server.endpoint, tmp_path)
    storage.write("before", b"x")
    renewed("second")
    assert storage.read("before") == b"x"
    renewed("third")
    assert moved(storage, tmp_path)


def test_credentials_that_nobody_renews_end_with_the_stores_reason(server: BadServer, tmp_path: Path) -> None:
    storage = store(server.endpoint, tmp_path, patience=2)
    server.tokens = True
    with pytest.raises(Exception, match="ExpiredToken"):
        storage.write("small", b"x")


def test_uploads_that_dead_attempts_left_are_aborted_and_those_of_newer_ones_are_not(s3_endpoint: str, tmp_path: Path) -> None:
    storage = store(s3_endpoint, tmp_path)
    keys = [f"checkpoints/step-00000002.a{attempt:04d}/rank-00000.safetensors" for attempt in (1, 2, 3)]
    for key in [*keys, "model/model.safetensors"]:
        upload = storage.client.create_multipart_upload(**storage._place(key))
        storage.client.upload_part(**storage._place(key), UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * MIB)
    storage.write("attempts/0001", b"")
    run_processes(1, take_stock, f"s3://runs/{tmp_path.name}", s3_endpoint)
    left = storage.client.list_multipart_uploads(Bucket="runs", Prefix=f"{tmp_path.name}/")
    assert [upload["Key"] for upload in left["Uploads"]] == [f"{tmp_path.name}/{keys[2]}"]


def test_half_written_files_that_dead_attempts_left_are_deleted_and_those_of_newer_ones_are_not(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    written = [checkpoints / f"step-00000002.a{attempt:04d}" / ".tmp-x1_y-rank-00000.safetensors" for attempt in (1, 2, 3)]
    others = [tmp_path / "run" / "model" / ".tmp-x1_y-config.json", tmp_path / "run" / ".tmp-x1_y-metrics.jsonl"]
    drivers = tmp_path / "run" / ".tmp-x1_y-owner.json"  # who may be about to finish it
    for file in [*written, *others, drivers]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    made = [checkpoints / f"step-00000004.a{attempt:04d}" for attempt in (1, 2, 3)]  # and died before the first byte
    for folder in made:
        folder.mkdir()
    LocalStorage(str(tmp_path / "run")).write("attempts/0001", b"")
    run_processes(1, take_stock, str(tmp_path / "run"), "http://none")
    left = {path for path in (tmp_path / "run").rglob("*") if "attempts" not in path.parts}
    assert left == {checkpoints, written[2].parent, written[2], made[2], drivers}


def take_stock(uri: str, endpoint: str) -> int:
    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig
    from trainer.parallel import Wish, join_world

    layer = torch.nn.Linear(4, 4)
    with join_world(lambda: Wish.NOTHING) as world:
        storage = open_storage(uri, StorageConfig(**s3_config(endpoint)))
        return Checkpoints(storage, CheckpointConfig(), world, layer, torch.optim.AdamW(layer.parameters())).restore()


# ---- whole runs ----


def run_on(endpoint: str, folder: Path, **changes: Any) -> dict[str, Any]:
    uri = {"uri": f"s3://runs/{folder.name}"}
    return settings(folder, storage=s3_config(endpoint) | uri, checkpoint={"every_steps": 2, "keep_last": 9}, **changes)


def impatient(values: dict[str, Any], patience: float) -> dict[str, Any]:
    """A run whose processes sit out a fault of a store so long only."""
    import trainer.storage as module
    import trainer.train

    module.LONGEST_PAUSE = 0.5
    trainer.train.open_storage = functools.partial(open_storage, patience=patience)
    return run_training(values)


def steps_of(result: dict[str, Any]) -> list[int]:
    return [row["step"] for row in result["rows"] if "loss" in row]


def checkpointed(uri: str, endpoint: str) -> list[int]:
    return [manifest["step"] for _, manifest in find_checkpoints(open_storage(uri, StorageConfig(**s3_config(endpoint))))]


def test_a_run_through_a_storm_loses_no_step_and_no_checkpoint(server: BadServer, s3_endpoint: str, tmp_path: Path) -> None:
    values = run_on(server.endpoint, tmp_path)
    ended = False

    def trouble(method: str, path: str) -> tuple[int, str] | None:
        stormy = int(time.monotonic()) % 4 < 2  # half of the time
        return (503, "SlowDown") if stormy and "/checkpoints/" in path and not ended else None

    server.trouble = trouble
    [result, _] = run_processes(2, impatient, values, 120.0)
    ended = True
    assert result["ending"] == "complete"
    assert steps_of(result) == list(range(1, 9))
    assert checkpointed(result["uri"], s3_endpoint) == [8, 6, 4, 2]


def test_an_upload_that_began_without_an_answer_is_not_left_when_the_run_is_complete(
    server: BadServer, s3_endpoint: str, tmp_path: Path
) -> None:
    begun: list[str] = []

    def trouble(method: str, path: str) -> None:  # the first save's request arrives twice, and once its answer does not
        if not begun and method == "PUT" and "/checkpoints/" in path:
            begun.append(path.removeprefix("/runs/"))
            store(s3_endpoint, tmp_path).client.create_multipart_upload(Bucket="runs", Key=begun[0])

    server.trouble = trouble
    [result] = run_processes(1, run_training, run_on(server.endpoint, tmp_path))
    assert result["ending"] == "complete"
    assert begun[0].endswith(".a0001/rank-00000.safetensors")
    left = store(s3_endpoint, tmp_path).client.list_multipart_uploads(Bucket="runs", Prefix=f"{tmp_path.name}/")
    assert left.get("Uploads", []) == []


def test_a_store_that_stays_broken_ends_the_run_with_its_reason_and_the_last_checkpoint_is_whole(
    server: BadServer, s3_endpoint: str, tmp_path: Path
) -> None:
    values = run_on(server.endpoint, tmp_path)
    broken = ("step-00000006", "step-00000008")
    server.trouble = lambda method, path: (
        (503, "SlowDown") if method in ("PUT", "POST") and any(step in path for step in broken) else None
    )
    with pytest.raises(AssertionError, match=r"the last checkpoint could not be stored: .*SlowDown"):
        run_processes(2, impatient, values, 2.0)
    [folder] = {key.split("/")[0] for key in store(s3_endpoint, tmp_path).list()} - {"tokens", "names"}
    uri = f"s3://runs/{tmp_path.name}/{folder}"
    assert checkpointed(uri, s3_endpoint) == [4, 2]
    server.trouble = lambda method, path: None
    [again, _] = run_processes(2, run_training, values)
    assert again["ending"] == "complete"
    assert steps_of(again) == [5, 6, 7, 8]


# `ray-finetune train` whose processes sit out a fault of the store for three seconds, and miss its answer for eight.
DRIVER = """
import sys, trainer.ownership, trainer.ray_train as module
from trainer.cli import main

def make_impatient():
    import trainer.storage
    trainer.storage.open_storage.__defaults__ = (3.0,)
    trainer.storage.LONGEST_PAUSE = 0.5

work = module.work

def impatient_work(payload, make_impatient=make_impatient, work=work):
    make_impatient()
    work(payload)

make_impatient()
trainer.ownership.SILENCE_SECONDS, module.work = -22.0, impatient_work
sys.argv[1:1] = ["train", "--run"]
main()
"""


def drive(folder: Path, values: dict[str, Any], when: Callable[[str], bool], then: Callable[[Any], None]) -> tuple[int, list[str]]:
    """A whole run under Ray, to which something is done at the first line for which `when` holds; exit code and lines."""
    (folder / "run.json").write_text(json.dumps({"trainer": values, "hardware": {"workers": 2, "grace_seconds": 30}}))
    (folder / "drive.py").write_text(DRIVER)
    command = [sys.executable, str(folder / "drive.py"), str(folder / "run.json")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert driver.stdout
    lines, done = [], False
    try:
        for line in driver.stdout:
            lines.append(line.strip())
            if not done and when(line):
                done = True
                then(driver)
        return driver.wait(300), lines
    finally:
        driver.kill()


@pytest.mark.parametrize("broken", ["everything", "the last save", "the save of a stop"])
def test_a_store_that_fails_for_ever_ends_the_whole_run_with_its_reason_and_what_was_saved_is_gone_on_from(
    server: BadServer, s3_endpoint: str, tmp_path: Path, broken: str
) -> None:
    steps = 10 if broken == "the last save" else 1000
    values = run_on(server.endpoint, tmp_path, duration={"steps": steps})
    if broken == "the last save":
        server.trouble = lambda method, path: (403, "AccessDenied") if "step-00000010" in path and method == "PUT" else None

    def strike(driver: subprocess.Popen[str]) -> None:
        if broken == "everything":
            server.trouble = lambda method, path: (503, "SlowDown")
        elif broken == "the save of a stop":
            server.trouble = lambda method, path: (403, "AccessDenied") if "/checkpoints/" in path and method == "PUT" else None
            driver.send_signal(signal.SIGTERM)

    code, lines = drive(tmp_path, values, lambda line: bool(re.match(r"step +5/", line)), strike)
    server.trouble = lambda method, path: None
    reason = {
        "everything": r"failed: another driver may have this run by now, as nothing could be written to s3://\S+ for \d+ s: .*SlowDown",
        "the last save": r"failed: the last checkpoint could not be stored: .*AccessDenied",
        "the save of a stop": r"failed: the last checkpoint could not be stored: .*AccessDenied",
    }
    assert code == 1, lines
    assert re.match(reason[broken], lines[-1]), lines
    [folder] = {key.split("/")[0] for key in store(s3_endpoint, tmp_path).list()} - {"tokens", "names"}
    uri = f"s3://runs/{tmp_path.name}/{folder}"
    there = open_storage(uri, StorageConfig(**s3_config(s3_endpoint)))
    saved = checkpointed(uri, s3_endpoint)[0]
    assert saved >= 4
    assert saved % 2 == 0
    assert not there.list("model")
    if broken != "everything":  # where it could be written down, it was
        outcome = json.loads(there.read("outcome.json"))
        assert outcome["outcome"] == "failed"
        assert lines[-1] == f"failed: {outcome['cause']}"
    [again, _] = run_processes(2, run_training, values, saved + 1 if steps > 10 else None)
    assert steps_of(again)[0] == saved + 1
