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
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config import InputError, RunError, RunFile
from trainer.ownership import Ownership
from trainer.progress import Progress, show_rows
from trainer.storage import Storage, check_writable, open_storage

ENDED_SECONDS = 10  # that workers have to leave once one of them has said how the run ends
STOPPED_SECONDS = 30  # more than Ray takes to stop a job
EXIT_CODES = {"complete": 0, "refused": 2, "failed": 1, "interrupted": 75}


def drive(run: RunFile) -> int:
    """Runs `run` from where it is to its end and returns the exit code."""
    progress = Progress(run.uri)
    stop = threading.Event()
    _stop_on_signals(stop, progress)
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


def _run_held(run: RunFile, storage: Storage, progress: Progress, stop: threading.Event, ownership: Ownership) -> str:
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
        from trainer.report import write_report

        write_outcome(run, storage, ending, str(cause).strip().rpartition("\n")[2] if cause else None, progress.step)
        if cause is None:
            write_report(run, storage)
            progress.ended(ending)
        ownership.release()
    if cause:
        raise cause
    return ending


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
    return None if outcome["outcome"] == "complete" and "model/config.json" not in storage.list("model") else outcome


def write_outcome(run: RunFile, storage: Storage, outcome: str, cause: str | None, step: int) -> None:
    """Says how the run ended, and how often in a row it has failed so: by this cause, at this step, on this hardware."""
    value = {"outcome": outcome, "cause": cause, "step": step, "hardware": run.hardware.model_dump(), "times": 1}
    before = read_outcome(storage) or {}
    if outcome == "failed" and all(before.get(key) == value[key] for key in ("outcome", "cause", "step", "hardware")):
        value["times"] = before.get("times", 1) + 1
    storage.write("outcome.json", json.dumps(value | {"time": time.time()}, indent=1).encode())


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
    folder, tokenizer, sets = resolve(config, storage, say)
    check_model(folder, tokenizer, config)
    storage.write("run.json", run.model_dump_json(indent=1).encode())
    plan = Plan(sets.train, config)
    say(describe_plan(sets, plan))
    return sets, plan, tokenizer


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


def stop(wait: bool) -> None:
    """Asks the run on this machine's Ray cluster to save and leave, and waits until it has; does nothing without one."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address="auto", namespace=Control.NAME, logging_level=logging.ERROR, log_to_driver=False)
        control: Any = ray.get_actor(Control.NAME)
        ray.get(control.ask_to_stop.remote())
        print("asked the run to save and leave")
        while wait and ray.get(control.ending.remote())[0] is None:
            time.sleep(0.5)
    except (ConnectionError, ValueError):
        print("no run is under way here")
    except RayError:
        print("the run has ended")


# ---- workers ----


def launch(run: RunFile, storage: Storage, progress: Progress, stop: threading.Event, ownership: Ownership) -> str:
    """Trains with whatever started us, and returns `complete` or `interrupted`."""
    if "RANK" in os.environ or importlib.util.find_spec("ray") is None:
        return _train_here(run, storage, progress, stop, ownership)
    prepare(run, storage, progress.say)
    return _train_on_ray(run, progress, stop, ownership)


def _train_here(run: RunFile, storage: Storage, progress: Progress, stop: threading.Event, ownership: Ownership) -> str:
    from trainer.parallel import join_world

    def check() -> None:
        prepare(run, storage, progress.say)

    def report(row: dict[str, Any]) -> None:
        ownership.check()
        progress.row(row)

    with join_world(stop.is_set) as world:
        world.main_first(check)
        return train_or_advise(run, world, report)


def _train_on_ray(run: RunFile, progress: Progress, stop: threading.Event, ownership: Ownership) -> str:
    """`fit` blocks, so it runs in a thread; signals reach only the main thread, which passes a stop on to the workers."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives way to everything else on a machine otherwise
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1800")  # nodes and images take minutes to come
    # A worker that hangs answers nobody, and by default Ray Train waits ten minutes for it before it looks at the others.
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "120")
    import ray

    workers, cpus = run.hardware.workers, run.hardware.cpus_per_worker
    quiet = {"logging_level": logging.ERROR, "log_to_driver": "RAY_ADDRESS" in os.environ}
    if "RAY_ADDRESS" in os.environ:
        ray.init(namespace=Control.NAME, **quiet)
    else:
        memory = 256 * 2**20  # nothing large is passed through Ray
        ray.init(
            address="local",
            namespace=Control.NAME,
            num_cpus=workers * cpus,
            include_dashboard=False,
            object_store_memory=memory,
            **quiet,
        )
    _stop_on_signals(stop, progress)  # again, as ray.init takes the signals for itself
    control: Any = ray.remote(num_cpus=0)(Control).options(name=Control.NAME, max_concurrency=1).remote()
    failure: list[Exception] = []
    thread = threading.Thread(target=_fit, args=(run, failure), daemon=True)
    try:
        thread.start()
        over = False
        while thread.is_alive():
            # A worker that has ended for good may leave the others waiting for it: they get a moment, and no more.
            thread.join(ENDED_SECONDS if over else 0.3)
            if over:
                break
            ownership.check()
            rows, begun, over = ray.get(control.exchange.remote(stop.is_set()))
            for row in rows:
                progress.row(row)
            if stop.is_set() and not begun:  # workers may wait for nodes for a long time, and there is nothing to save
                return "interrupted"
        for row in ray.get(control.exchange.remote(stop.is_set()))[0]:
            progress.row(row)
        ending, cause = ray.get(control.ending.remote())
    finally:
        ray.shutdown()
    if ending == "refused":
        raise InputError(cause)
    if ending == "failed":
        raise RunError(cause)
    if failure or ending is None:
        logs = "the workers ended without saying how; Ray's logs are in /tmp/ray/session_latest/logs"
        raise RunError(cause or (str(failure[0]).strip() if failure else logs))
    return ending


def _fit(run: RunFile, failure: list[Exception]) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    hardware = run.hardware
    if "RAY_ADDRESS" not in os.environ:
        logging.getLogger("ray.train").setLevel(logging.ERROR)
    # Ray Train is told nothing of checkpoints, so its own storage is a folder that nobody reads again.
    with tempfile.TemporaryDirectory(prefix="ray-finetune-", ignore_cleanup_errors=True) as scratch:
        trainer = TorchTrainer(
            work,
            train_loop_config={"run": run.model_dump(mode="json"), "cwd": os.getcwd()},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if hardware.gpus_per_node else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=hardware.workers,
                use_gpu=hardware.gpus_per_node > 0,
                resources_per_worker={"CPU": hardware.cpus_per_worker} | ({"GPU": 1} if hardware.gpus_per_node else {}),
                placement_strategy="PACK" if hardware.gpus_per_node else "SPREAD",
            ),
            run_config=RunConfig(
                name=run.trainer.name, storage_path=scratch, failure_config=FailureConfig(max_failures=run.trainer.max_failures)
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            failure.append(error)


def work(payload: dict[str, Any]) -> None:
    """What Ray Train runs in each worker. What no retry mends is told to the driver, which then ends all of them."""
    import ray

    from trainer.model import quiet_transformers
    from trainer.parallel import join_world

    if Path(payload["cwd"]).is_dir():  # a local run's paths are relative to where it was started
        os.chdir(payload["cwd"])
    control = ray.get_actor(Control.NAME, namespace=Control.NAME)
    ray.get(control.begin.remote())
    asked: list[Any] = []

    def stop_asked() -> bool:
        """The answer to the last question that has one: the loop never waits for the head."""
        if not asked:
            asked.append(control.stopping.remote())
        ready, _ = ray.wait(asked, timeout=0)
        return bool(ready) and ray.get(asked.pop())

    quiet_transformers()
    with join_world(stop_asked) as world:
        try:
            ending = train_or_advise(RunFile.model_validate(payload["run"]), world, lambda row: control.add.remote(row))
        except (InputError, RunError) as error:
            ray.get(control.end.remote("refused" if isinstance(error, InputError) else "failed", str(error)))
            return
        except Exception as error:  # raised again, so that Ray starts the workers anew; the first to fail is the cause
            ray.get(control.failed.remote(f"{type(error).__name__} on worker {world.rank}: {error}"))
            raise
        if world.is_main:
            ray.get(control.end.remote(ending, None))


def train_or_advise(run: RunFile, world: Any, report: Callable[[dict[str, Any]], None]) -> str:
    """`train`, in which a GPU that is too small becomes a RunError with advice: no retry mends that."""
    import torch

    from trainer.train import train

    try:
        return train(run, world, report)
    except torch.OutOfMemoryError as error:
        size = f"batch.micro_batch {run.trainer.batch.micro_batch} and data.sequence_length {run.trainer.data.sequence_length}"
        reason = str(error).partition(". ")[0]
        raise RunError(
            f"the memory of worker {world.rank}'s GPU is too small for {size} ({reason}); lower one, or take more workers"
        ) from None


class Control:
    """An actor on the head: carries rows from the workers to the driver, and a stop the other way."""

    NAME = "ray-finetune"  # and its Ray namespace

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stop = self.begun = False
        self.how: tuple[str | None, str | None] = (None, None)
        self.failures: list[str] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.failures = []  # those before it were mended

    def exchange(self, stop: bool) -> tuple[list[dict[str, Any]], bool, bool]:
        """Takes note of a stop; the rows that have come since the last call, whether workers have ever begun, and ended."""
        self.stop = self.stop or stop
        rows, self.rows = self.rows, []
        return rows, self.begun, self.how[0] in ("refused", "failed")

    def begin(self) -> None:
        self.begun = True

    def failed(self, cause: str) -> None:
        self.failures.append(cause)

    def stopping(self) -> bool:
        return self.stop

    def ask_to_stop(self) -> None:
        self.stop = True

    def end(self, ending: str, cause: str | None) -> None:
        self.how = (ending, cause)

    def ending(self) -> tuple[str | None, str | None]:
        """How the run has ended, and why; a cause alone is that of the first worker that failed."""
        return (None, self.failures[0]) if self.how[0] is None and self.failures else self.how


def _stop_on_signals(stop: threading.Event, progress: Progress) -> None:
    """SIGTERM and SIGINT set `stop`; a second SIGINT leaves at once, without saving."""

    def handle(number: int, _frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        progress.say("stopping: saving a checkpoint first" + (" (Ctrl-C again: leave without)" if number == signal.SIGINT else ""))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
