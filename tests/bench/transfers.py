"""Measures how fast a checkpoint goes to S3 and back, beside the pyarrow call that Ray Train makes for its own.

    python tests/bench/transfers.py [--gib N] [--rounds N] [--tools FOLDER] [--connections N]

A real S3 server (versitygw) keeps its files in memory, behind a proxy (toxiproxy) that lets each connection have 90 MB/s,
as S3 does. Each figure is of a new process with a new client, so that the first save counts: median, and the first.
`save` is trainer.checkpoint's, with its checksums and manifest, from memory; pyarrow starts from a file in memory.
`--tools` names the folder with the two programs, where `make tools` has not built them here: they need nothing else.
Memory of 4 times --gib is needed. Ends with 1 where a goal is missed: 3 times pyarrow's speed up, twice down.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]

KILOBYTES_PER_SECOND = 90_000  # of a connection
RAY_CHUNK = 64 * 2**20  # ray.train.v2._internal.execution.storage
GOALS = {"up": 3.0, "down": 2.0}


def make_checkpoints(uri: str, endpoint: str, gib: float, world: Any) -> Any:
    """The checkpoints of `gib` of tensors of 64 MiB, or smaller where there is less."""
    import torch
    from servers import s3_config

    from trainer.checkpoint import Checkpoints
    from trainer.config import CheckpointConfig, StorageConfig
    from trainer.storage import open_storage

    each = int(min(gib, 1 / 16) * 2**28)
    model = torch.nn.ParameterList(torch.full((each,), float(number)) for number in range(int(gib * 2**28) // each))
    storage = open_storage(uri, StorageConfig(**s3_config(endpoint)))
    return Checkpoints(storage, CheckpointConfig(keep_last=1), world, model, torch.optim.SGD(model.parameters()))


def filesystem(fs: Any, endpoint: str) -> Any:
    from servers import CREDENTIALS

    return fs.S3FileSystem(
        access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        scheme="http",
        endpoint_override=endpoint.removeprefix("http://"),
    )


def prepare(what: str, endpoint: str, folder: Path, gib: float, world: Any) -> Callable[[], Any]:
    """What is to be timed, its data made and its libraries loaded."""
    import pyarrow.fs

    fs: Any = pyarrow.fs
    local = fs.LocalFileSystem()
    arrow = {"chunk_size": RAY_CHUNK, "use_threads": False}
    if what == "pyarrow up":
        source = folder / "source"
        if not source.exists():
            source.mkdir()
            with (source / "checkpoint").open("wb") as file:
                for _ in range(int(gib * 64)):
                    file.write(os.urandom(2**20) * 16)
        return lambda: fs.copy_files(
            str(source), "runs/pyarrow", source_filesystem=local, destination_filesystem=filesystem(fs, endpoint), **arrow
        )
    if what == "pyarrow down":
        target = folder / "pyarrow"
        target.mkdir(exist_ok=True)
        return lambda: fs.copy_files(
            "runs/pyarrow", str(target), source_filesystem=filesystem(fs, endpoint), destination_filesystem=local, **arrow
        )
    checkpoints = make_checkpoints("s3://runs/ours", endpoint, gib, world)
    if what == "save":
        return lambda: (checkpoints.save(checkpoints.attempt), checkpoints.finish())
    if what == "restore":
        return checkpoints.restore

    def fetch() -> None:
        [key] = [key for key in checkpoints.storage.list("checkpoints") if key.endswith(".safetensors")]
        checkpoints.storage.download(key, folder / "ours")

    return fetch


def time_one(what: str, endpoint: str, folder: Path, gib: float, connections: int | None) -> None:
    """In its own process: prints the seconds."""
    import boto3  # noqa: F401  (what is imported once a process is no part of a transfer)

    import trainer.storage
    from trainer.parallel import Wish, join_world

    trainer.storage.CONNECTIONS = connections or trainer.storage.CONNECTIONS
    with join_world(lambda: Wish.NOTHING) as world:
        work = prepare(what, endpoint, folder, gib, world)
        began = time.perf_counter()
        work()
        print(json.dumps(time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--connections", type=int, help="of our client; its own number where left out")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        what, endpoint, folder = arguments.one
        time_one(what, endpoint, Path(folder), arguments.gib, arguments.connections)
        return
    if arguments.tools:
        os.environ["PATH"] = f"{arguments.tools.resolve()}{os.pathsep}{os.environ['PATH']}"
    from servers import CREDENTIALS, bad_line, s3_server

    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="transfers-", dir=memory))
    size = str(arguments.gib)
    more = ["--connections", str(arguments.connections)] if arguments.connections else []
    try:
        with s3_server(folder / "s3") as port, bad_line(port) as line:
            for stream in ("upstream", "downstream"):
                line.toxic("bandwidth", stream, rate=KILOBYTES_PER_SECOND)
            found: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for what in ("pyarrow up", "save", "pyarrow down", "download", "restore"):
                    command = [sys.executable, __file__, "--gib", size, *more, "--one", what, line.endpoint, str(folder)]
                    environment = os.environ | CREDENTIALS | {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    found.setdefault(what, []).append(json.loads(done.stdout.splitlines()[-1]))
                    print(f"{what}: {found[what][-1]:.1f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    sys.exit(show(found, arguments.gib * 2**30 / 1e6))


def show(found: dict[str, list[float]], megabytes: float) -> int:
    """Prints the table; 1 where a goal is missed."""
    print(f"{os.cpu_count()} cores, {megabytes:,.0f} MB, {KILOBYTES_PER_SECOND / 1000:.0f} MB/s a connection\n")
    print("| transfer | MB/s | first | beside pyarrow | goal |\n|---|---|---|---|---|")
    missed = 0
    for what, seconds in found.items():
        way = "up" if what in ("save", "pyarrow up") else "down"
        base = statistics.median(found[f"pyarrow {way}"])
        times, first = base / statistics.median(seconds), found[f"pyarrow {way}"][0] / seconds[0]
        ours = what in ("save", "download")
        missed |= ours and min(times, first) < GOALS[way]
        goal = f"{GOALS[way]:g}" if ours else ""
        print(f"| {what} | {megabytes / statistics.median(seconds):,.0f} | {megabytes / seconds[0]:,.0f} | {times:.1f} | {goal} |")
    return int(missed)


if __name__ == "__main__":
    main()
