"""A real S3 server over a folder, for the tests that keep runs in S3."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from hypothesis import settings

# `make cases` sets how many examples each property is tried on. No deadline: what a loaded machine takes says nothing.
settings.register_profile("trainer", max_examples=int(os.environ.get("EXAMPLES", 100)), deadline=None)
settings.load_profile("trainer")

TOOLS = Path(__file__).parents[2] / ".tools" / "bin"


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a versitygw with the bucket `runs`; its credentials are in the environment."""
    server = shutil.which("versitygw", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    assert server, "versitygw is missing: run `make tools`"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    folder = tmp_path_factory.mktemp("s3")
    process = subprocess.Popen(
        [server, "--access", "test", "--secret", "testsecret", "--port", f"127.0.0.1:{port}", "posix", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = boto3.client("s3", endpoint_url=endpoint)
        for _ in range(100):
            try:
                client.create_bucket(Bucket="runs")
                break
            except Exception:
                time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
