"""On the cluster of `make cluster`: a namespace, and a bucket with a small model and rows."""

import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "cluster"), str(TESTS / "trainer")]

import cluster  # noqa: E402
import tiny  # noqa: E402
from release import BUCKET, NAMESPACE, STEPS, Release, make_namespace, s3_client, settings  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

# 1.5 M parameters.
SHAPE: dict[str, Any] = tiny.SHAPE | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: of make e2e-full, and too long for make e2e")


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The namespace with the S3 server's keys, and what environments/smoke names in the bucket."""
    assert cluster.running(), "no cluster is up: make cluster"
    folder = tmp_path_factory.mktemp("data")
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder / "model")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    tiny.write_rows(folder / "data/train.jsonl", 2000)
    tiny.write_rows(folder / "data/eval.jsonl", 20, seed=1)
    (folder / "data/bad.jsonl").write_text('{"messages": "not a list"}\n')
    s3 = s3_client()
    if BUCKET not in [each["Name"] for each in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=BUCKET)
    for each in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="runs/").search("Contents[]"):
        if each:
            s3.delete_object(Bucket=BUCKET, Key=each["Key"])  # runs of an earlier session would be complete at once
    for path in folder.rglob("*.*"):
        s3.upload_file(str(path), BUCKET, str(path.relative_to(folder)))
    make_namespace(NAMESPACE)


@pytest.fixture
def release(platform: None, request: pytest.FixtureRequest) -> Iterator[Release]:
    """A release of the test's own, gone with it."""
    release = Release(f"r{zlib.crc32(request.node.name.encode()):x}")
    yield release
    release.uninstall()


@pytest.fixture(scope="session")
def undisturbed(platform: None, report: Callable[[str], None]) -> Iterator[Release]:
    """A release whose run is complete."""
    release = Release("undisturbed")
    started = time.monotonic()
    release.install(trainer=settings("undisturbed"))
    release.wait_for_end()
    report(f"helm install to the end of {STEPS} steps: {time.monotonic() - started:.0f} s")
    yield release
    release.uninstall()


LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keeps a measured number for the end of the output."""
    return pytestconfig.stash.setdefault(LINES, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
