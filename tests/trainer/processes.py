"""Runs a function in several real processes joined by gloo, and brings back what each returns."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer.train", "trainer.driver", "transformers.models.qwen2.modeling_qwen2"])


def run_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `size` processes with torchrun's variables set; an error in one fails the test."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            CONTEXT.Process(target=_run, args=(rank, size, port, folder, dict(os.environ), function, arguments))
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(500)
            if worker.is_alive():
                worker.kill()
        results = []
        for rank, worker in enumerate(workers):
            path = Path(folder, str(rank))
            ok, value = pickle.loads(path.read_bytes()) if path.exists() else (False, f"exit code {worker.exitcode}")
            assert ok, f"rank {rank}: {value}"
            results.append(value)
        return results


def _run(
    rank: int,
    size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    # The fork server's environment is that of its start, not the test's.
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        result = (True, function(*arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
