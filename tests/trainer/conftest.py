"""A real S3 server over a folder, for the tests that keep runs in S3, and a disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from servers import CREDENTIALS, s3_server

# `make cases` sets how many examples each property is tried on. No deadline: what a loaded machine takes says nothing.
settings.register_profile("trainer", max_examples=int(os.environ.get("EXAMPLES", 100)), deadline=None)
settings.load_profile("trainer")


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a versitygw with the bucket `runs`; its credentials are in the environment."""
    with pytest.MonkeyPatch.context() as environment, s3_server(tmp_path_factory.mktemp("s3")) as port:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield port


@pytest.fixture(scope="session")
def s3_endpoint(s3_port: int) -> str:
    """The URL of `s3_port`."""
    return f"http://127.0.0.1:{s3_port}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
