"""Measures the data part in one run on one machine, beside TRL and datasets, and writes benchmarks/data-<date>.md and .json.

    python tests/bench/data.py [--quick]        (make bench-data)

Everything that is timed runs in a process of its own, the peers in turn with us, three times; a median is reported with
its CPU seconds, which tell more than the clock where a machine has other work. Exits 1 where TRL learns other tokens
than we do and no reason is known.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from chats import FOLDER, ROOT, WORK, tokenizers, write_rows
from same_as_trl import PEERS, measure, peer, table

OUR_PASS = Path(__file__).with_name("our_pass.py")
PROCESSES = 2
REPEATS = 3
GIB = 2**30
PR_SET_CHILD_SUBREAPER = 36
LIMIT = 1536 * 2**20


# ---- one process ----


def timed(command: list[Any]) -> dict[str, float]:
    """What the command prints as JSON, with the CPU seconds of it and of every process that it starts."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a process that outlives the command becomes a child of this one
    here, before = set(psutil.Process().children()), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    for left in set(psutil.Process().children()) - here:
        os.waitpid(left.pid, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stderr[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout.splitlines()[-1]) | {"cpu_seconds": cpu}


def limited(command: list[Any]) -> tuple[list[Any], str]:
    """The command under the kernel's limit of memory, where systemd gives one, and what the limit is."""
    prefix = ["systemd-run", "--scope", "--quiet", f"--property=MemoryMax={LIMIT}", "--property=MemorySwapMax=0"]
    prefix += [] if os.getuid() == 0 else ["--user"]
    works = shutil.which("systemd-run") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return ([*prefix, *command], "1.5 GiB, by a cgroup") if works else (command, "1.5 GiB, ended by the watcher")


def peak_memory(command: list[Any]) -> dict[str, Any]:
    """As `timed`, with the largest memory of the whole tree of processes, looked at once a second; above LIMIT it is ended.

    `peak` is the sum of proportional set sizes: a page that several processes share counts once.
    """
    command, limit = limited(command)
    found: dict[str, Any] = {"peak": 0.0, "processes": 0, "limit": limit}
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def look() -> None:
        while process.poll() is None:
            sizes = []
            try:
                root = psutil.Process(process.pid)
                for one in [root, *root.children(recursive=True)]:
                    sizes.append(one.memory_full_info().pss)
            except psutil.Error:
                pass
            found["peak"] = max(found["peak"], float(sum(sizes)))
            found["processes"] = max(found["processes"], len(sizes))
            if sum(sizes) > LIMIT:
                process.terminate()
            time.sleep(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    out, errors = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command} failed, at {found['peak'] / GIB:.2f} GiB of memory:\n{errors[-3000:]}")
    return json.loads(out.splitlines()[-1]) | found


# ---- what is measured ----


def parse(lines: list[bytes]) -> int:
    from trainer.rows import parse_line, parse_row

    return sum(parse_row(parse_line(line)).weight > 0 for line in lines)


def validation(path: Path, rows: int) -> dict[str, float]:
    """Rows a second that are checked for JSON, keys and roles, by two processes that are there already."""
    from trainer.config import SourceConfig, StorageConfig
    from trainer.sources import Source

    source = Source(SourceConfig(path=str(path)), 0, StorageConfig(), "data.train")
    seconds = []
    with ProcessPoolExecutor(PROCESSES, get_context("forkserver")) as pool:
        list(pool.map(parse, [[b'{"text": "a"}']] * 2 * PROCESSES))
        for _ in range(REPEATS):
            begin = time.perf_counter()
            count = sum(pool.map(parse, (piece.rows for piece in source.pieces(source.files[0], 0))))
            seconds.append(time.perf_counter() - begin)
            assert count == rows
    begin, piece = time.process_time(), next(iter(source.pieces(source.files[0], 0)))
    count = parse(piece.rows)
    return {
        "rows": rows,
        "rows_per_second": rows / statistics.median(seconds),
        "rows_per_cpu_second": count / (time.process_time() - begin),
    }


def speed(path: Path, rows: int, own: Path, marked: Path, quick: bool) -> dict[str, dict[str, float]]:
    """Rows a second of our pass, TRL's preparation and a bare datasets.map, one after the other, three times."""
    peers = ROOT / "tests/bench/peers.py"
    store = WORK / "store"
    commands: dict[str, list[Any]] = {
        "ours, template with markers": [sys.executable, OUR_PASS, path, marked, store],
        "ours, own template by proof": [sys.executable, OUR_PASS, path, own, store],
        "TRL, assistant only, 1 process": [PEERS, peers, "prepare", path, marked, 1],
        "TRL, assistant only, 2 processes": [PEERS, peers, "prepare", path, marked, 2],
        "datasets.map, template alone, 1 process": [PEERS, peers, "map", path, marked, 1],
        "datasets.map, template alone, 2 processes": [PEERS, peers, "map", path, marked, 2],
    }
    if quick:
        commands = {name: command for name, command in commands.items() if "proof" not in name and "map" not in name}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(1 if quick else REPEATS):
        for name, command in commands.items():
            runs[name].append(timed(command))
    counts = {(run["tokens"], run["supervised"]) for name in commands for run in runs[name] if "tokens" in run}
    if len(counts) > 1:
        raise SystemExit(f"the passes count different tokens: {counts}")
    return {
        name: {
            "rows_per_second": rows / statistics.median(run["seconds"] for run in found),
            "fastest": rows / min(run["seconds"] for run in found),
            "slowest": rows / max(run["seconds"] for run in found),
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in found),
        }
        for name, found in runs.items()
    }


def packing(sets: list[tuple[str, np.ndarray, int]]) -> list[dict[str, Any]]:
    """How full the sequences of ours and of TRL's best fit are, and the seconds both take."""
    from trainer.packing import pack

    found, files = [], []
    for number, (name, lengths, capacity) in enumerate(sets):
        lengths = np.minimum(lengths, capacity).astype(np.int32)
        file = WORK / f"lengths-{number}.bin"
        lengths.tofile(file)
        files.append(f"{file}:{capacity}")
        begin = time.perf_counter()
        packs = pack(lengths, capacity, np.random.default_rng(0).permutation(len(lengths)))
        seconds, total = time.perf_counter() - begin, int(lengths.sum())
        full = total / (len(packs) * capacity)
        found.append(
            {"lengths": name, "rows": len(lengths), "capacity": capacity, "tokens": total, "ours": full, "ours_seconds": seconds}
        )
    for one, theirs in zip(found, json.loads(peer("pack", *files)), strict=True):
        one |= {"trl": one["tokens"] / (theirs["packs"] * one["capacity"]), "trl_seconds": theirs["seconds"]}
    return found


def memory(size: int, marked: Path) -> list[dict[str, Any]]:
    """Peak memory of our pass over a quarter of `size` bytes and over all of them."""
    found = []
    for part in (size // 4, size):
        path, rows = write_rows("large.jsonl", size=part)
        try:
            run = peak_memory([sys.executable, OUR_PASS, path, marked, WORK / "store"])
        finally:
            path.unlink()
        found.append({"bytes": part, "rows": rows, "rows_per_second": rows / run["seconds"]} | run)
    return found


def quickstart_lengths(own: Path) -> np.ndarray:
    timed([sys.executable, OUR_PASS, ROOT / FOLDER / "train.jsonl", own, WORK / "store"])
    return np.fromfile(WORK / "store.lengths", np.int32)


# ---- the run ----


def versions() -> dict[str, str]:
    ours = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True)
    return {"ray-finetune": ours.stdout.strip(), "python": platform.python_version()} | json.loads(peer("versions"))


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def step(what: str, action: Callable[[], Any]) -> Any:
    begin = time.monotonic()
    found = action()
    print(f"{what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def run(quick: bool) -> dict[str, Any]:
    WORK.mkdir(parents=True, exist_ok=True)
    begin, load = time.monotonic(), os.getloadavg()[0]
    own, marked = tokenizers()
    rows_path, rows = write_rows("rows.jsonl", count=1000 if quick else 6000)
    short_path, short = write_rows("short.jsonl", count=30_000 if quick else 300_000, short=True)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "quick": quick,
        "versions": versions(),
        "machine": {
            "processor": processor(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_gib": psutil.virtual_memory().total / GIB,
        },
        "rows": {"count": rows, "bytes": rows_path.stat().st_size},
        "validation": step("validation", lambda: validation(short_path, short)),
        "speed": step("speed", lambda: speed(rows_path, rows, own, marked, quick)),
    }
    lengths = np.fromfile(WORK / "store.lengths", np.int32)
    real = quickstart_lengths(own)
    sets = [("these rows", lengths, 2048), ("these rows", lengths, 4096), ("quickstart", real, 512), ("quickstart", real, 2048)]
    result["packing"] = step("packing", lambda: packing(sets))
    if not quick:
        same, unexpected = step("same as TRL", measure)
        result["same"], result["unexpected"] = same, unexpected
        result["memory"] = step("memory", lambda: memory(10**9, marked))
    result["load"] = {"before": load, "after": os.getloadavg()[0]}
    result["seconds"] = time.monotonic() - begin
    return result


def markdown(result: dict[str, Any]) -> str:
    rows, machine, load = result["rows"], result["machine"], result["load"]
    check, speeds = result["validation"], result["speed"]
    names = list(speeds)
    trl = max(speeds[name]["rows_per_second"] for name in names if name.startswith("TRL"))
    trl_cpu = min(speeds[name]["cpu_seconds"] for name in names if name.startswith("TRL"))
    lines = [
        f"# Data, {result['date']}",
        "",
        f"Made by `make bench-data`{' QUICK=1' if result['quick'] else ''}, in {result['seconds']:.0f} s, on {machine['cpus']} CPUs "
        f"({machine['processor']}), {machine['memory_gib']:.0f} GiB. Load average {load['before']:.1f} before and {load['after']:.1f} after"
        + (": other work ran beside it, so that the clock says less than the CPU seconds do." if load["before"] > 0.5 else "."),
        "",
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".",
        "",
        "## Checking rows",
        "",
        f"{check['rows']:,} short rows, JSON, keys and roles, two processes: **{check['rows_per_second']:,.0f} rows/s** "
        f"(median of {REPEATS}); one process alone {check['rows_per_cpu_second']:,.0f} rows a CPU second.",
        "",
        "## The whole pass",
        "",
        f"{rows['count']:,} rows, {rows['bytes'] / 1e6:.0f} MB, from the file to ids and masks; median, slowest and fastest of {1 if result['quick'] else REPEATS}. "
        "Timed is the way from the file to ids and masks on disk, worker processes included, the main process's own imports not; "
        "CPU seconds include all. Ours checks and hashes each row and writes the token store; TRL's is `load_dataset`, then its "
        "trainer's preparation with `assistant_only_loss`. Neither packs here. `datasets.map` makes no masks.",
        "",
        "| | Rows/s | Slowest to fastest | CPU seconds | Rate against TRL's best | CPU against TRL's best |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, one in speeds.items():
        lines.append(
            f"| {name} | {one['rows_per_second']:,.0f} | {one['slowest']:,.0f} to {one['fastest']:,.0f} | {one['cpu_seconds']:.1f} "
            f"| {one['rows_per_second'] / trl:.2f} | {trl_cpu / one['cpu_seconds']:.2f} |"
        )
    lines += [
        "",
        "## Packing",
        "",
        "| Lengths of | Rows | Sequence | Ours | TRL bfd | Seconds, ours and TRL's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one['lengths']} | {one['rows']:,} | {one['capacity']:,} | {one['ours']:.2%} | {one['trl']:.2%} "
        f"| {one['ours_seconds']:.2f}, {one['trl_seconds']:.2f} |"
        for one in result["packing"]
    ]
    if "memory" in result:
        lines += [
            "",
            "## Memory of the whole pass",
            "",
            "| Rows | Bytes | Peak, all processes | Processes | Rows/s | Limit |",
            "|---:|---:|---:|---:|---:|---|",
        ]
        for one in result["memory"]:
            lines.append(
                f"| {one['rows']:,} | {one['bytes'] / 1e9:.2f} GB | {one['peak'] / GIB:.2f} GiB | {one['processes']} "
                f"| {one['rows_per_second']:,.0f} | {one['limit']} |"
            )
        lines += [
            "",
            "The peak is the largest sum of proportional set sizes, looked at once a second. Where systemd runs, a cgroup holds the "
            "limit; else the pass is ended when a look finds more. RLIMIT_AS and RLIMIT_DATA would not do: both count address space, "
            "of which libraries take much more than memory.",
        ]
    if "same" in result:
        lines += [
            "",
            "## The same ids and masks as TRL",
            "",
            "Rows of each kind, generated; a row that differs in several ways counts in each.",
            "",
        ]
        lines += [table(result["same"])]
        lines += ["", *([f"**Not expected: {line}**" for line in result["unexpected"]] or ["No difference without a reason."])]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one time each of fewer things; no memory, no comparison of masks")
    quick = parser.parse_args().quick
    result = run(quick)
    name = f"data-{result['date']}{'-quick' if quick else ''}"
    folder = WORK if quick else ROOT / "benchmarks"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))
    return 1 if result.get("unexpected") else 0


if __name__ == "__main__":
    sys.exit(main())
