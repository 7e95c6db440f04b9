"""Kills, freezes, stops and damages small runs at random, and checks that nothing is lost, repeated or mistaken.

    python tests/chaos/chaos.py [--rounds N] [--seed N] [--out FILE]        # make chaos ROUNDS=200 SEED=1

A round is one run of one to three real processes, on a disk or in S3 (versitygw behind a proxy of bad connections and one
of errors). Attempts that end by a fault are followed by another, at random with another number of processes, until the
run is complete. A round's faults are drawn from its number alone: `--seed 17 --rounds 1` repeats round 17. The moment at
which one strikes is a step and some milliseconds; one that comes when the run is complete already is not counted.

After each round: every attempt went on from the newest valid checkpoint, as an own reading of the files says; the steps
that lead to the final weights have the undisturbed run's rows, each step once; the weights are the undisturbed run's,
bitwise where the number of processes was always two; no half-written file and no unfinished upload is left.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer"), str(ROOT / "tests" / "chaos")]

from processes import CONTEXT  # noqa: E402
from servers import CREDENTIALS, BadLine, BadServer, bad_line, bad_server, free_port, s3_config, s3_server  # noqa: E402

NUM_STEPS = 12
FAULTS = ["kill one", "kill all", "stop", "freeze", "die in an upload", "damage"]
S3_FAULTS = ["errors", "resets", "outage"]
LIMIT_SECONDS = 600  # for an attempt; one that takes longer hangs, on however busy a machine


# ---- in a worker ----


def work(rank: int, size: int, port: int, values: dict[str, Any], log: str, dies: int | None) -> None:
    """One process of an attempt. Rank 0 writes down in `log` what happens; `dies`: in its upload of that save, counted from 1.

    What it prints is in `log`.txt.
    """
    import torch

    import trainer.storage
    import trainer.train as module
    from trainer.checkpoint import Checkpoints
    from trainer.config import RunFile
    from trainer.driver import prepare
    from trainer.parallel import Wish, join_world
    from trainer.storage import S3Storage, open_storage

    output = os.open(f"{log}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= CREDENTIALS | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
    trainer.storage.LONGEST_PAUSE, trainer.storage.PART_BYTES = 0.5, 5 * 2**20
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**event: Any) -> None:
        if rank == 0:
            os.write(file, (json.dumps(event) + "\n").encode())

    restore, load, upload, train_step = Checkpoints.restore, Checkpoints._load, Checkpoints._upload, module.train_step
    step, folders, saves = [0], [""], [0]

    def noted_load(self: Any, folder: str, manifest: Any) -> Any:
        folders[0] = folder
        return load(self, folder, manifest)

    def noted_restore(self: Any) -> int:
        step[0] = restore(self)
        note(attempt=self.attempt, resumed=step[0], folder=folders[0] if step[0] else "")
        return step[0]

    def noted_step(model: Any, optimizer: Any, tokens: Any, packs: Any, *rest: Any) -> Any:
        result = train_step(model, optimizer, tokens, packs, *rest)
        step[0] += 1
        note(step=step[0], rows=[[int(row) for row in pack] for pack in packs])
        return result

    def deadly_upload(self: Any, key: str, pieces: Any) -> Any:
        saves[0] += 1
        if dies == saves[0] and isinstance(self.storage, S3Storage):
            cut = trainer.storage._cut
            trainer.storage._cut = lambda pieces, start, into: cut(pieces, start, into) if start == 0 else _die()
        elif dies == saves[0]:
            pieces = _Deadly(pieces)
        return upload(self, key, pieces)

    Checkpoints.restore, Checkpoints._load, module.train_step = noted_restore, noted_load, noted_step
    Checkpoints._upload = deadly_upload
    run = RunFile.model_validate({"trainer": values})
    with join_world(lambda: Wish.LEAVE if stopped else Wish.NOTHING) as world:
        world.main_first(lambda: prepare(run, open_storage(run.uri, run.trainer.storage), lambda text: None) and None)
        note(ending=module.train(run, world, lambda row: None))


class _Deadly(list):  # type: ignore[type-arg]
    """Pieces of a file of which a disk gets half."""

    def __iter__(self) -> Iterator[Any]:
        yield from self[: len(self) // 2]
        _die()


def _die() -> Any:
    time.sleep(0.05)  # other parts are under way
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the harness ----


class WrongError(Exception):
    """What must not happen has happened."""


@dataclass
class Attempt:
    """The processes of one start of the workers, and what they have written down."""

    size: int
    log: Path
    processes: list[Any]
    seen: list[dict[str, Any]] = field(default_factory=list)

    def events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            self.seen = [json.loads(line) for line in self.log.read_bytes().split(b"\n")[:-1]]
        return self.seen

    def first(self, key: str) -> Any:
        return next((event[key] for event in self.events() if key in event), None)

    def at_step(self, step: int) -> bool:
        """Waits until a step has been taken; False where the attempt ended before."""
        end = time.monotonic() + LIMIT_SECONDS
        while not any(event.get("step", 0) >= step for event in self.events()):
            if self.is_over():
                return False
            self.pause(end, f"step {step} was not reached")
        return True

    def wait(self, but: int | None = None) -> None:
        """Waits until all have ended, but one that is frozen."""
        end = time.monotonic() + LIMIT_SECONDS
        while not self.is_over(but):
            self.pause(end, "the workers had not ended")

    def is_over(self, but: int | None = None) -> bool:
        """Whether all have ended but that one. Nobody ends those that are left when one has died: they must see it themselves."""
        return not any(process.is_alive() for rank, process in enumerate(self.processes) if rank != but)

    def pause(self, end: float, wrong: str) -> None:
        if time.monotonic() > end:
            _signal(self.processes, signal.SIGUSR1)  # they write down where they are
            time.sleep(1)
            raise WrongError(f"{wrong} within {LIMIT_SECONDS} s")
        time.sleep(0.01)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


class Run:
    """One round: a run, where it is kept, and the attempts at it so far."""

    def __init__(self, number: int, folder: Path, base: dict[str, Any], s3: Path | None, server: BadServer, line: BadLine):
        self.number = number
        self.random = random.Random(number)
        self.in_s3 = s3 is not None
        self.server, self.line = server, line
        where = s3_config(server.endpoint) | {"uri": f"s3://runs/round-{number}"} if self.in_s3 else {"uri": str(folder / "run")}
        self.values = base | {"storage": where}
        self.place = s3 / "runs" / f"round-{number}" if s3 else folder / "run"  # its files, as the disk has them
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.steady = self.random.random() < 0.5  # always two processes
        self.attempts: list[Attempt] = []
        self.faults: list[str] = []
        self.frozen: list[Attempt] = []
        self.save_seconds: list[float] = []  # from each SIGTERM to the manifest that it led to

    @property
    def folder(self) -> Path:
        [found] = [path for path in self.place.iterdir() if path.name.startswith("tiny-")]
        return found

    def start(self, dies: tuple[int, int] | None = None) -> Attempt:
        size = 2 if self.steady else self.random.choice([1, 2, 2, 3])
        number, port = len(self.attempts), free_port()
        log = self.logs / f"{number}.jsonl"
        processes = [
            CONTEXT.Process(
                target=work, args=(rank, size, port, self.values, str(log), dies[1] if dies and dies[0] % size == rank else None)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        self.attempts.append(Attempt(size, log, processes))
        return self.attempts[-1]

    def valid(self) -> tuple[int, str]:
        """Step and folder of the checkpoint that an attempt must go on from: the newest one whose every byte is right."""
        limit, best = float("inf"), (0, "")
        found: dict[int, list[tuple[int, str]]] = {}
        if not self.place.exists() or not any(path.name.startswith("tiny-") for path in self.place.iterdir()):
            return best
        for path in sorted((self.folder / "checkpoints").glob("step-*")):
            if _is_whole(path):
                attempt = int(path.name[-4:])
                found.setdefault(attempt, []).append((int(path.name[5:13]), f"checkpoints/{path.name}"))
        starts = {attempt.first("attempt"): attempt.first("resumed") for attempt in self.attempts}
        for attempt in sorted(found, reverse=True):
            if reachable := [item for item in found[attempt] if item[0] <= limit]:
                return max(reachable)
            limit = min(limit, starts[attempt])
        return best


def _is_whole(folder: Path) -> bool:
    with contextlib.suppress(Exception):
        manifest = json.loads((folder / "manifest.json").read_bytes())
        checksum = manifest.pop("checksum")
        if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != checksum:
            return False
        files = manifest["files"].items()
        return all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"] for name, facts in files)
    return False


def disturbed(run: Run) -> bool:
    """One attempt that a fault ends or spoils; whether it completed the run none the less."""
    run.random.seed(f"{run.number} {len(run.attempts)}")  # whatever was drawn before, which may depend on time
    fault = run.random.choice(FAULTS + (S3_FAULTS if run.in_s3 else []))
    chosen, save = run.random.randrange(3), run.random.randint(1, 3)
    expected, asked = run.valid(), 0.0
    attempt = run.start((chosen, save) if fault == "die in an upload" else None)
    victim = chosen % attempt.size
    reached = attempt.at_step(expected[0] + run.random.randint(1, max(1, NUM_STEPS - expected[0])))
    time.sleep(run.random.random() * 0.1)
    for zombie in run.frozen:
        _signal(zombie.processes, signal.SIGCONT)
    struck = attempt.first("ending") is None
    if fault == "kill one":
        _signal([attempt.processes[victim]], signal.SIGKILL)
    elif fault in ("kill all", "damage"):
        _signal(attempt.processes, signal.SIGKILL)
    elif fault == "stop":
        asked = time.time()
        _signal(attempt.processes, signal.SIGTERM)
    elif fault == "freeze" and reached:
        _signal([attempt.processes[victim]], signal.SIGSTOP)
        _signal([process for rank, process in enumerate(attempt.processes) if rank != victim], signal.SIGKILL)
        run.frozen.append(attempt)
    elif fault in S3_FAULTS:
        _spoil_line(run, fault)
    attempt.wait(but=victim if attempt in run.frozen else None)
    check_start(attempt, expected)
    ending = attempt.first("ending")
    if fault in S3_FAULTS and ending != "complete":
        raise WrongError(f"{fault} of the store ended the attempt")
    if fault == "stop" and ending is None:
        raise WrongError("a stop was not followed by an orderly end")
    if ending == "interrupted":
        saved, folder = run.valid()
        if saved != attempt.events()[-2]["step"]:
            raise WrongError(f"a stop after step {attempt.events()[-2]['step']} left a checkpoint of step {saved}")
        run.save_seconds.append((run.folder / folder / "manifest.json").stat().st_mtime - asked)
    if fault == "damage" and ending is None:
        fault = damage(run)
    if struck and (fault in S3_FAULTS or ending != "complete"):
        run.faults.append(fault)
    return ending == "complete"


def _signal(processes: list[Any], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _spoil_line(run: Run, fault: str) -> None:
    seconds = 0.5 + 2 * run.random.random()
    if fault == "errors":
        end = time.monotonic() + seconds
        answers = [(503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable")]
        run.server.trouble = lambda method, path: random.choice(answers) if time.monotonic() < end else None
        time.sleep(seconds)
    elif fault == "resets":
        run.line.toxic("limit_data", "upstream", bytes=run.random.choice([100, 100_000, 3_000_000]))
        time.sleep(seconds)
        run.line.clear()
    else:
        run.line.cut()
        time.sleep(seconds)
        run.line.cut(False)


def damage(run: Run) -> str:
    """Spoils a file of the newest checkpoint; the name of the fault, which is another one where there is none."""
    step, name = run.valid()
    if not step:
        return "kill all"
    path = run.random.choice(sorted(path for path in (run.folder / name).iterdir() if path.suffix != ".json" or "man" in path.name))
    kind = run.random.choice(["bit", "cut", "gone", "extra"])
    data = bytearray(path.read_bytes())
    if kind == "bit":
        data[run.random.randrange(len(data))] ^= 1 << run.random.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        os.truncate(path, run.random.randrange(len(data)))
    elif kind == "gone":
        path.unlink()
    else:
        (path.parent / "rank-00009.safetensors").write_bytes(data[:100])
    return f"damage: {kind}"


def check_start(attempt: Attempt, expected: tuple[int, str]) -> None:
    resumed = attempt.first("resumed")
    if resumed is not None and (resumed, attempt.first("folder")) != expected:
        raise WrongError(
            f"went on from step {resumed} ({attempt.first('folder')}), and not from step {expected[0]} ({expected[1]})"
        )


def lineage(run: Run) -> list[dict[str, Any]]:
    """The steps that lead to the final weights, in order: of each attempt those up to where the next one went on."""
    by_attempt = {attempt.first("attempt"): attempt for attempt in run.attempts}
    at, until, steps = run.attempts[-1], NUM_STEPS, []
    while True:
        steps = [event for event in at.events() if "step" in event and event["step"] <= until] + steps
        if not at.first("resumed"):
            return steps
        until = at.first("resumed")
        at = by_attempt[int(at.first("folder")[-4:])]


def check_end(run: Run, rows: list[Any], weights: dict[str, Any]) -> None:
    """What must hold of a complete run; WrongError where it does not."""
    import torch
    from safetensors.torch import load_file

    steps = lineage(run)
    if [(event["step"], event["rows"]) for event in steps] != list(enumerate(rows, start=1)):
        raise WrongError(f"the rows of steps {[event['step'] for event in steps]} are not the undisturbed run's")
    found = load_file(run.folder / "model" / "model.safetensors")
    always_two = all(attempt.size == 2 for attempt in run.attempts)
    for name, expected in weights.items():
        same = torch.equal(found[name], expected) if always_two else torch.allclose(found[name], expected, rtol=1e-3, atol=2e-4)
        if not same:
            raise WrongError(f"{name} is {(found[name] - expected).abs().max():.2g} off the undisturbed run's")
    for path in (run.folder / "checkpoints").iterdir():
        if not _is_whole(path) and (path / "manifest.json").exists() and int(path.name[-4:]) == run.attempts[-1].first("attempt"):
            raise WrongError(f"{path.name} is damaged")
        if not (path / "manifest.json").exists():
            raise WrongError(f"{path.name} is left half-written")
    if left := [path.name for path in run.folder.rglob(".tmp-*") if not path.name.endswith(".lock")]:
        raise WrongError(f"{left} are left")
    if run.in_s3 and (uploads := unfinished_uploads(run)):
        raise WrongError(f"unfinished uploads of {uploads} are left")


def unfinished_uploads(run: Run) -> list[str]:
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
    path_style = Config(s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=run.server.endpoint, region_name="us-east-1", config=path_style, **keys)
    found = client.list_multipart_uploads(Bucket="runs", Prefix=f"round-{run.number}/")
    return [upload["Key"] for upload in found.get("Uploads", [])]


def play(run: Run, rows: list[Any], weights: dict[str, Any]) -> None:
    """Faults, then peace until the run is complete."""
    try:
        complete = False
        for _ in range(run.random.randint(1, 3)):
            if complete := disturbed(run):
                break
        while not complete:
            expected = run.valid()
            attempt = run.start()
            attempt.at_step(min(NUM_STEPS, expected[0] + 1 + run.random.randrange(3)))
            for zombie in run.frozen:  # they wake up beside the attempt that took over
                _signal(zombie.processes, signal.SIGCONT)
            attempt.wait()
            check_start(attempt, expected)
            complete = attempt.first("ending") == "complete"
            if not complete:
                raise WrongError("an attempt without a fault did not complete the run")
        for zombie in run.frozen:
            _signal(zombie.processes, signal.SIGCONT)
            zombie.wait()
        check_end(run, rows, weights)
    finally:
        for attempt in run.attempts:
            attempt.end()
        run.server.trouble = lambda method, path: None
        run.line.clear()
        run.line.cut(False)


def base_settings(folder: Path) -> dict[str, Any]:
    import tiny

    changes: dict[str, Any] = {
        "duration": {"steps": NUM_STEPS},
        "checkpoint": {"every_steps": 2, "keep_last": 3},
        "evaluate": {"prompts": 0},
    }
    with patch.dict(tiny.SHAPE, hidden_size=128, intermediate_size=384, num_hidden_layers=8):  # of any rank an upload has parts
        values = tiny.settings(folder, **changes)
    del values["data"]["eval"]
    return values


def chaos(numbers: Iterable[int], say: Callable[[str], None]) -> tuple[Counter[str], list[float]]:
    """Plays the rounds of these numbers; how many of what there were, of them `wrong` ones, and the seconds that each stop took."""
    from safetensors.torch import load_file

    found: Counter[str] = Counter()
    save_seconds: list[float] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        port = stack.enter_context(s3_server(folder / "s3"))
        line = stack.enter_context(bad_line(port))
        server = stack.enter_context(bad_server(int(line.endpoint.rpartition(":")[2])))
        base = base_settings(folder)
        calm = Run(0, folder / "calm", base, None, server, line)
        calm.steady = True
        calm.start().wait()
        rows = [event["rows"] for event in calm.attempts[0].events() if "step" in event]
        weights = load_file(calm.folder / "model" / "model.safetensors")
        for number in numbers:
            began = time.monotonic()
            run = Run(number, folder / str(number), base, folder / "s3" if number % 2 else None, server, line)
            outcome = "ok"
            try:
                play(run, rows, weights)
            except Exception as error:
                outcome = f"WRONG: {error}" if isinstance(error, WrongError) else "WRONG: " + traceback.format_exc()
                outcome += "".join(f"\n--- {path.name}\n{path.read_text()}" for path in sorted(run.logs.iterdir()))
                found["wrong"] += 1
            found.update(run.faults)
            save_seconds += run.save_seconds
            found["rounds"] += 1
            found["faults"] += len(run.faults)
            found["attempts"] += len(run.attempts)
            sizes = ",".join(str(attempt.size) for attempt in run.attempts)
            where = "s3" if run.in_s3 else "disk"
            took = f"{time.monotonic() - began:.0f} s at load {os.getloadavg()[0]:.0f}"
            say(f"round {number}: {where}, workers {sizes}; {', '.join(run.faults) or 'none in time'}; {took}; {outcome}")
            shutil.rmtree(folder / str(number))
            shutil.rmtree(folder / "s3" / "runs" / f"round-{number}", ignore_errors=True)
    return found, save_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="number of the first round")
    parser.add_argument("--out", type=Path, help="a Markdown file for what is printed")
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    found, seconds = chaos(range(arguments.seed, arguments.seed + arguments.rounds), say)
    summary = f"{found['rounds'] - found['wrong']} of {found['rounds']} rounds right; {found['faults']} faults in {found['attempts']} attempts."
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(found.items()) if name.partition(":")[0] in FAULTS + S3_FAULTS)
    if seconds:
        summary += f" {len(seconds)} stops: {statistics.median(seconds):.1f} s from SIGTERM to the manifest (median), {max(seconds):.1f} s (most)."
    print(summary, kinds, sep="\n")
    if arguments.out:
        title = f"# Chaos, {time.strftime('%Y-%m-%d')}"
        command = f"`make chaos ROUNDS={arguments.rounds} SEED={arguments.seed}` on {os.cpu_count()} cores: {summary}"
        arguments.out.write_text("\n".join([title, "", command, "", f"Faults: {kinds}.", "", "```", *lines, "```", ""]))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
