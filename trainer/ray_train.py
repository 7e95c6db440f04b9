"""A run's workers under Ray Train: started, told to save or to leave, watched, and begun anew in another number.

Owns all that is Ray's. Ray Train ends and begins all workers together: after a failure, when a node is gone, and where
their number is a range, when one comes back. It is told nothing of checkpoints; workers that begin find the newest one.
Two things reach the loop from outside, through `Wishes`: the driver's, and Ray's notice that nodes are to go.
"""

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import PreemptingState, ResizingState, RunningState, SchedulingState
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision
from ray.train.v2.api.exceptions import WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.config import InputError, RunError, RunFile
from trainer.control import Control, News, control
from trainer.driver import Stop, train_or_advise
from trainer.model import quiet_transformers
from trainer.ownership import Ownership
from trainer.parallel import START_SECONDS, Wish, join_world
from trainer.progress import Progress

ENDED_SECONDS = 5  # that workers have to leave once one of them has said how the run ends
GONE_SECONDS = 30  # far more than `trainer.fit()` takes to see that its controller is gone
DRAIN_POLL_SECONDS = 1.0
RESIZE_SECONDS = 60.0  # between two looks at whether there is room for more workers
PLACE_SECONDS = 20  # in which workers must find their places where their number is a range; a node may have gone since
OBJECT_STORE_BYTES = 256 * 2**20  # of a local cluster: nothing large is passed through Ray


# ---- the driver's side ----


def train_on_ray(run: RunFile, progress: Progress, stop: Stop, ownership: Ownership) -> str:
    """Trains to `complete` or `interrupted`. `fit` blocks, so it runs in a thread; signals reach only the main one."""
    _connect(run)
    stop.on_signals(progress)  # again, as ray.init takes the signals for itself
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(Control).options(name=Control.NAME, num_cpus=0, max_concurrency=1, scheduling_strategy=here).remote()
    failure: list[Exception] = []
    thread = threading.Thread(target=_fit, args=(run, failure), name="trainer.fit", daemon=True)
    try:
        thread.start()
        alive = True
        news = News([], 0, False, False, None, None)
        while alive and news.ending is None:
            thread.join(0.3)
            alive = thread.is_alive()
            ownership.check()
            news = cast(News, ray.get(actor.news.remote(stop.is_set())))
            progress.groups = max(1, news.groups)
            for row in news.rows:
                progress.row(row)
            if news.stopping:
                stop.set()
            if stop.is_set() and not news.under_way and news.ending is None:
                return "interrupted"  # workers may wait for nodes for long, and there is nothing to save
        # A worker that has ended for good may leave the others waiting for it: they get a moment, and no more.
        stop.note_saved()
        thread.join(ENDED_SECONDS)
    finally:
        _end(thread, actor)
        ray.shutdown()
    if news.ending == "refused":
        raise InputError(news.cause)
    if news.ending is None or news.ending == "failed":
        raise RunError(first_cause(news, failure))
    return news.ending


def _end(thread: threading.Thread, actor: Any) -> None:
    """Ends Ray Train, and all workers with it, before Ray itself: whoever asks Ray anything after that ends this process at once."""
    deadline = time.monotonic() + GONE_SECONDS
    with contextlib.suppress(RayError):
        while thread.is_alive() and time.monotonic() < deadline:
            controller: Any = ray.get(actor.train_controller.remote())
            if controller is not None:
                ray.kill(controller)
            thread.join(0.3)


def _connect(run: RunFile) -> None:
    """Joins the cluster that RAY_ADDRESS names, or makes one of this machine."""
    hardware = run.hardware
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives way to everything else on a machine otherwise
    # A worker that hangs answers nobody, and by default Ray Train waits ten minutes for it before it looks at the others.
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "120")
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", str(DRAIN_POLL_SECONDS))
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1800")  # nodes and images take minutes to come
    if hardware.min_workers is not None:  # they are begun where they have places already
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(PLACE_SECONDS)
    if "RAY_ADDRESS" in os.environ:
        ray.init(namespace=Control.NAME, logging_level=logging.ERROR)
        return
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    # Workers on CPUs: what a backward pass frees goes back at once, instead of staying in a heap full of holes.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 * 2**20))
    ray.init(
        address="local",
        namespace=Control.NAME,
        num_cpus=hardware.workers * hardware.cpus_per_worker,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def _fit(run: RunFile, failure: list[Exception]) -> None:
    hardware = run.hardware
    # Ray Train is told nothing of checkpoints, so its own storage is a folder that nobody reads again.
    with tempfile.TemporaryDirectory(prefix="ray-finetune-", ignore_cleanup_errors=True) as scratch:
        trainer = Trainer(
            work,
            train_loop_config={"run": run.model_dump(mode="json"), "cwd": os.getcwd()},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if hardware.gpus_per_node else "gloo", timeout_s=START_SECONDS),
            scaling_config=ScalingConfig(
                num_workers=hardware.workers if hardware.min_workers is None else (hardware.min_workers, hardware.workers),
                elastic_resize_monitor_interval_s=RESIZE_SECONDS,
                use_gpu=hardware.gpus_per_node > 0,
                resources_per_worker={"CPU": hardware.cpus_per_worker} | ({"GPU": 1} if hardware.gpus_per_node else {}),
                placement_strategy="PACK" if hardware.gpus_per_node else "SPREAD",
            ),
            run_config=RunConfig(
                name=run.trainer.name,
                storage_path=scratch,
                failure_config=FailureConfig(max_failures=run.trainer.max_failures),
                callbacks=[Resize(run.trainer.hang_seconds)],  # pyright: ignore[reportArgumentType]
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            failure.append(error)


def first_cause(news: News, failure: list[Exception]) -> str:
    """A worker that died told nobody, and what the others said is only that they missed it."""
    error = failure[0] if failure else None
    if isinstance(error, WorkerGroupError):
        gone = (WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
        dead = sorted(rank for rank, reason in error.worker_failures.items() if isinstance(reason, gone))
        if dead and news.ending is None:
            return f"worker {dead[0]} died: {' '.join(str(error.worker_failures[dead[0]]).split())}"
    if news.cause or error:
        return news.cause or str(error).strip()
    return "the workers ended without saying how; Ray's logs are in /tmp/ray/session_latest/logs"


class Trainer(TorchTrainer):
    """Ray Train's, whose workers are counted by `Places` where their number is a range."""

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        if self.scaling_config.elasticity_enabled:
            parts["scaling_policy"] = Places(self.scaling_config)
        return super()._initialize_and_run_controller(**parts)


class Places(ElasticScalingPolicy):
    """In Ray Train's controller: with how many workers to begin, and whether to begin anew with more.

    Ray Train's own view of the nodes is up to 20 seconds old and counts those that drain. By it, it would wait for places
    on nodes that are gone, and end workers for more of them that have none.
    """

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        room = _room(cast(dict[str, float], self.scaling_config._resources_per_worker_not_none))
        return min(super()._count_possible_workers(reserved_resources), room)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        grows = getattr(decision, "num_workers", 0) > worker_group_state.num_workers
        return decision if grows else NoopDecision()  # a node that is lost ends its worker, and a drain is a notice


class Resize(ControllerCallback):
    """In Ray Train's controller: says who it is and whether there are workers, and has them save and leave before a resize ends them."""

    def __init__(self, patience: float):
        self.patience = patience  # seconds that workers have to save
        self.resizing = False

    def after_controller_start(self, train_run_context: Any) -> None:
        ray.get(control().set_train_controller.remote(ray.get_runtime_context().current_actor))

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        self.resizing = isinstance(current_state, ResizingState) or (self.resizing and isinstance(current_state, SchedulingState))
        under_way = self.resizing or isinstance(current_state, RunningState | PreemptingState)
        control().set_under_way.remote(under_way)

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if not self.resizing:  # there are no workers, or none that could save
            return
        actor, deadline = control(), time.monotonic() + self.patience
        ray.get(actor.set_resizing.remote(True))
        while not ray.get(actor.has_parted.remote()) and time.monotonic() < deadline:
            time.sleep(0.2)
        ray.get(actor.set_resizing.remote(False))


def _room(resources: dict[str, float]) -> int:
    """How many workers with these resources each find a place on nodes that are there and stay."""
    leaving = ray._private.state.state.get_draining_nodes()  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]
    return sum(int(min(node.get(name, 0) // count for name, count in resources.items() if count)) for node in nodes)


# ---- a worker's side ----


def work(payload: dict[str, Any]) -> None:
    """What Ray Train runs in each worker. What no retry mends is told to the driver, which then ends all of them."""
    if Path(payload["cwd"]).is_dir():  # a local run's paths are relative to where it was started
        os.chdir(payload["cwd"])
    actor = control()
    quiet_transformers()
    with join_world(Wishes(actor)) as world:
        if world.is_main:
            actor.begin.remote()
        try:
            ending = train_or_advise(RunFile.model_validate(payload["run"]), world, lambda row: actor.add.remote(row))
        except (InputError, RunError) as error:
            ray.get(actor.end.remote("refused" if isinstance(error, InputError) else "failed", str(error)))
            return
        except Exception as error:  # raised again, so that Ray starts the workers anew; the first to fail is the cause
            ray.get(actor.failed.remote(f"{type(error).__name__} on worker {world.rank}: {error}"))
            raise
        if world.is_main:
            ray.get(actor.end.remote(ending, None))


class Wishes:
    """What is asked of a worker from outside. Calling it gives the most that was asked since the last call, and waits for nobody."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.asked: Any = None  # the question that has no answer yet
        self.notices: queue.SimpleQueue[Wish] = queue.SimpleQueue()
        threading.Thread(target=self._watch_nodes, daemon=True).start()

    def __call__(self) -> Wish:
        wish = Wish.NOTHING
        while not self.notices.empty():
            wish = max(wish, self.notices.get())
        self.asked = self.asked or self.actor.leaving.remote()
        if ray.wait([self.asked], timeout=0)[0]:
            wish = Wish.LEAVE if ray.get(self.asked) else wish
            self.asked = None
        return wish

    def _watch_nodes(self) -> None:
        """In a thread of every worker, as Ray's answer comes only when all of them have asked: one notice for each node that drains."""
        context, told = ray.train.get_context(), set()
        while True:
            try:
                notice = ray.train.get_preemption_info()
            except RayError:  # the workers are being ended
                return
            if notice is not None and context.get_world_rank() == 0:
                if len(notice.preempted_ranks) == context.get_world_size():
                    self.notices.put(Wish.LEAVE)
                elif not told >= set(notice.preempted_node_ids):
                    self.notices.put(Wish.SAVE)
                told |= set(notice.preempted_node_ids)
            time.sleep(DRAIN_POLL_SECONDS)
