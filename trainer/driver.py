"""The driver: refuses what cannot work, starts the workers, watches them, and writes down how the run ended.

Everything up to `launch` runs on a CPU, before any worker exists. Ray Train launches, watches and restarts workers;
where RANK is set (torchrun) or Ray is not installed, this process is a worker itself and runs the same loop.
torch and ray are imported inside functions: a complete run is told from its folder in a second.
"""

import importlib.util
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from trainer.config import Hardware, InputError, RunError, RunFile
from trainer.estimate import find_gpu, without_float8
from trainer.ownership import Ownership
from trainer.plan import catalogue, too_small
from trainer.progress import Progress, describe_start, show_rows
from trainer.storage import Storage, check_writable, open_storage

STOPPED_SECONDS = 30  # more than Ray takes to stop a job
EXIT_CODES = {"complete": 0, "refused": 2, "failed": 1, "interrupted": 75}


class Stop(threading.Event):
    """The wish that the run saves and leaves: when it came, and when the checkpoint that it asks for was complete."""

    asked_at: float | None = None
    saved_at: float | None = None

    def set(self) -> None:
        self.asked_at = self.asked_at or time.monotonic()
        super().set()

    def note_saved(self) -> None:
        self.saved_at = time.monotonic()

    @property
    def seconds(self) -> float | None:
        """From the wish to the checkpoint; None without either."""
        return round(self.saved_at - self.asked_at, 1) if self.saved_at and self.asked_at else None

    def on_signals(self, progress: Progress) -> None:
        """SIGTERM and SIGINT set it from now on; a second SIGINT leaves at once, without saving."""

        def handle(number: int, _frame: Any) -> None:
            if self.is_set() and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.set()
            progress.say(
                "stopping: saving a checkpoint first" + (" (Ctrl-C again: leave without)" if number == signal.SIGINT else "")
            )

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)


def drive(run: RunFile) -> int:
    """Runs `run` from where it is to its end and returns the exit code."""
    progress = Progress(run.uri)
    stop = Stop()
    stop.on_signals(progress)
    try:
        storage, complete_at = open_run(run)
        if complete_at is not None:
            print(f"{run.uri} is complete (step {complete_at}); change a setting to train another")
            return EXIT_CODES["complete"]
        ownership = Ownership(storage, run, stop.set)
        if not progress.silent and not ownership.acquire(progress.say, stop):
            return EXIT_CODES["interrupted"]
        ending = _run_held(run, storage, progress, stop, ownership)
    except InputError:
        stop_own_job()
        raise
    if ownership.handed_over:
        stop_own_job()
    return EXIT_CODES[ending]


def _run_held(run: RunFile, storage: Storage, progress: Progress, stop: Stop, ownership: Ownership) -> str:
    """Launches a run that this driver holds, writes down how it ended, and lets it go."""
    cause: Exception | None = None
    try:
        refuse_failed_twice(run, storage)
        ending = launch(run, storage, progress, stop, ownership)
    except KeyboardInterrupt as error:
        from trainer.tokens import Stopped

        if not isinstance(error, Stopped):
            ownership.release()
            raise
        ending = "interrupted"
    except Exception as error:
        ending, cause = "refused" if isinstance(error, InputError) else "failed", error
    progress.close()
    if not progress.silent and not ownership.lost.is_set():
        try:
            _write_records(run, storage, progress, stop, ending, cause)
        except Exception as error:
            cause = cause or error
            progress.say(f"warning: how the run ended could not be written down: {error}")
        ownership.release()
    if cause:
        raise cause
    return ending


def _write_records(run: RunFile, storage: Storage, progress: Progress, stop: Stop, ending: str, cause: Exception | None) -> None:
    """outcome.json, and of a run that did not fail, report.html."""
    from trainer.report import write_report

    why = str(cause).strip().rpartition("\n")[2] if cause else None
    saved = stop.seconds if ending == "interrupted" else None
    write_outcome(run, storage, ending, why, progress.step, save_seconds=saved, starts=progress.starts, exported=progress.exported)
    if cause is None:
        write_report(run, storage)
        progress.ended(ending, saved)


def open_run(run: RunFile) -> tuple[Storage, int | None]:
    """The run's folder, which can be written, and the step at which the run is complete, or None."""
    check_writable(open_storage(run.uri, run.trainer.storage, patience=0))  # what is wrong with it is told at once
    storage = open_storage(run.uri, run.trainer.storage)
    outcome = read_outcome(storage)
    return storage, outcome["step"] if outcome and outcome["outcome"] == "complete" else None


def read_outcome(storage: Storage) -> dict[str, Any] | None:
    """How the run ended last, or None; a run is complete only while its model is there."""
    try:
        outcome = json.loads(storage.read("outcome.json"))
    except (FileNotFoundError, ValueError):
        return None
    exported = {"model/config.json", "model/adapter_config.json"} & storage.list("model").keys()
    return None if outcome["outcome"] == "complete" and not exported else outcome


def write_outcome(run: RunFile, storage: Storage, outcome: str, cause: str | None, step: int, **facts: Any) -> None:
    """Says how the run ended, and how often in a row it has failed so: by this cause, at this step, on this hardware."""
    value = {"outcome": outcome, "cause": cause, "step": step, "hardware": run.hardware.model_dump(), "times": 1}
    before = read_outcome(storage) or {}
    if outcome == "failed" and all(before.get(key) == value[key] for key in ("outcome", "cause", "step", "hardware")):
        value["times"] = before.get("times", 1) + 1
    storage.write("outcome.json", json.dumps(value | facts | {"time": time.time()}, indent=1).encode())


def refuse_failed_twice(run: RunFile, storage: Storage) -> None:
    """InputError where a release's run has failed twice in the same way, on the same hardware: KubeRay would go on trying."""
    before = read_outcome(storage)
    if run.release and before and before.get("times", 1) > 1 and before["hardware"] == run.hardware.model_dump():
        where = f"failed twice in the same way at step {before['step']} ({before['cause']})"
        raise InputError(f"{run.uri}: {where}; mend the cause and delete outcome.json there, or change the hardware")


def stop_own_job() -> None:
    """Where this is the driver of a submitted Ray job, has Ray stop it: KubeRay retries a failed job, but no stopped one."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("metadata", {}).get("job_submission_id")
    if job is None:
        return
    from ray.job_submission import JobSubmissionClient

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which is how Ray stops it
    try:
        JobSubmissionClient("http://127.0.0.1:8265").stop_job(job)
        time.sleep(STOPPED_SECONDS)
    except Exception as error:  # the exit code tells the rest
        print(f"could not stop Ray job {job}: {error}", flush=True)


# ---- before any worker ----


def prepare(run: RunFile, storage: Storage, say: Callable[[str], None]) -> tuple[Any, Any, Any]:
    """Checks model and data, and pins in the run's folder what it trains on; InputError says what cannot work.

    Returns the rows, the plan of steps and the tokenizer.
    """
    from trainer.identity import compare_with_last
    from trainer.inputs import describe_plan, resolve
    from trainer.model import check_model, quiet_transformers
    from trainer.packing import Plan

    quiet_transformers()
    config = run.trainer
    if (idle := run.hardware.workers - config.batch.sequences) > 0:
        sequences = (
            f"batch.sequences: {config.batch.sequences} sequences a step leave {idle} of {run.hardware.workers} workers idle"
        )
        raise InputError(f"{sequences}; write at least {run.hardware.workers}, or take fewer workers")
    if config.precision == "float8" and (unable := _without_float8(run.hardware)):
        raise InputError(without_float8(unable))
    compare_with_last(run, say)
    folder, tokenizer, sets = resolve(config, storage, say)
    check_model(folder, tokenizer, config)
    if reason := too_small(run, folder):
        say(f"memory: perhaps too small: {run.hardware.instance_type}: {reason}")
    storage.write("run.json", run.model_dump_json(indent=1).encode())
    plan = Plan(sets.train, config)
    say(describe_plan(sets, plan))
    return sets, plan, tokenizer


def _without_float8(hardware: Hardware) -> str | None:
    """What the run's workers are known to compute on that multiplies no 8-bit floats."""
    facts = catalogue().get(hardware.instance_type or "")
    gpu = find_gpu(facts["gpu_model"]) if facts else None
    if hardware.gpus_per_node == 0:
        return "a CPU"
    return facts["gpu_model"] if facts and gpu and not gpu.float8 else None


# ---- questions from outside ----


def preflight(run: RunFile) -> None:
    """What the driver checks before it asks for workers, alone; InputError where a run would be refused."""
    storage, complete_at = open_run(run)
    if complete_at is not None:
        print(f"{run.uri} is complete (step {complete_at})")
        return
    sets, plan, tokenizer = prepare(run, storage, print)
    show_rows(sets, plan, tokenizer, Console(highlight=False, soft_wrap=True))
    print(f"ready: {run.uri}")


def status(run: RunFile) -> None:
    """Prints how far a run is, from its folder alone."""
    from trainer.checkpoint import find_checkpoints
    from trainer.metrics import read_rows

    storage = open_storage(run.uri, run.trainer.storage, patience=0)
    outcome = read_outcome(storage)
    steps = [row for row in read_rows(storage) if "loss" in row]
    checkpoints = [manifest["step"] for _, manifest in find_checkpoints(storage)]
    print(f"run         {run.uri}")
    print(f"outcome     {outcome['outcome'] + (': ' + outcome['cause'] if outcome['cause'] else '') if outcome else 'none yet'}")
    print(
        f"step        {steps[-1]['step']} of {steps[-1]['num_steps']}, loss {steps[-1]['loss']:.3f}" if steps else "step        0"
    )
    print(f"checkpoint  {f'step {checkpoints[0]}' if checkpoints else 'none'}")
    for start in outcome.get("starts", []) if outcome else []:
        print(f"started     {describe_start(start)}")
    if outcome and outcome.get("save_seconds") is not None:
        print(f"saved       {outcome['save_seconds']} s after it was asked to stop")


def stop(wait: bool) -> None:
    """Asks the run on this machine's Ray cluster to save and leave, and waits until it has; does nothing without one."""
    import ray
    from ray.exceptions import RayError

    from trainer.control import control

    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        actor = control()
        ray.get(actor.ask_to_stop.remote())
        print("asked the run to save and leave")
        while wait and not ray.get(actor.has_ended.remote()):
            time.sleep(0.5)
    except (ConnectionError, ValueError):
        print("no run is under way here")
    except RayError:
        print("the run has ended")


# ---- workers ----


def launch(run: RunFile, storage: Storage, progress: Progress, stop: Stop, ownership: Ownership) -> str:
    """Trains with whatever started us, and returns `complete` or `interrupted`."""
    if "RANK" in os.environ or importlib.util.find_spec("ray") is None:
        return _train_here(run, storage, progress, stop, ownership)
    prepare(run, storage, progress.say)
    from trainer.ray_train import train_on_ray

    return train_on_ray(run, progress, stop, ownership)


def _train_here(run: RunFile, storage: Storage, progress: Progress, stop: Stop, ownership: Ownership) -> str:
    from trainer.parallel import Wish, join_world

    def check() -> None:
        prepare(run, storage, progress.say)

    def report(row: dict[str, Any]) -> None:
        ownership.check()
        progress.row(row)

    with join_world(lambda: Wish.LEAVE if stop.is_set() else Wish.NOTHING) as world:
        world.main_first(check)
        ending = train_or_advise(run, world, report)
        stop.note_saved()
        return ending


def train_or_advise(run: RunFile, world: Any, report: Callable[[dict[str, Any]], None]) -> str:
    """`train`, in which a GPU or a disk that is too small becomes a RunError with advice: no retry mends that."""
    import torch

    from trainer.train import train

    try:
        return train(run, world, report)
    except torch.OutOfMemoryError as error:
        size, reason = run.trainer.batch.micro_batch, str(error).partition(". ")[0]
        lower = f"lower batch.micro_batch from {size}" if (size or 0) > 1 else "set batch.micro_batch to 1"
        raise RunError(
            f"the memory of worker {world.rank}'s GPU is too small ({reason}); {lower}, lower data.sequence_length, or take more workers"
        ) from None
    except Exception as error:
        if "No space left on device" not in str(error):  # safetensors' and tokenizers' own errors have no number
            raise
        raise RunError(f"worker {world.rank} has met a full disk; free space there and start the run again: {error}") from None
