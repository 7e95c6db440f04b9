"""Nodes that die, drain and come back under a run, on a real Ray cluster of several raylets on this machine."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from ray.cluster_utils import Cluster
from tiny import settings
from training import run_training, weights

# A driver whose steps take a quarter of a second while a file is there, and that looks for room for more workers every two.
DRIVER = """
import sys, time, trainer.ray_train as module
from pathlib import Path
from trainer.config import RunFile, load_settings
from trainer.driver import drive

work = module.work

def slow_work(payload, slow=Path(sys.argv[1]).with_name("slow")):
    import time, trainer.train
    step = trainer.train.train_step
    trainer.train.train_step = lambda *arguments: (time.sleep(0.25 * slow.exists()), step(*arguments))[1]
    work(payload)

module.work, module.RESIZE_SECONDS, module.PLACE_SECONDS = slow_work, 2.0, 10
sys.exit(drive(load_settings(RunFile, Path(sys.argv[1]))))
"""


class Run:
    """A driver on the cluster, what it has said, and the run's folder."""

    def __init__(
        self, folder: Path, address: str, values: dict[str, Any], hardware: dict[str, Any], request: pytest.FixtureRequest
    ):
        (folder / "run.json").write_text(json.dumps({"trainer": values, "hardware": hardware}))
        (folder / "drive.py").write_text(DRIVER)
        environment = os.environ | {"RAY_ADDRESS": address, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(folder / "drive.py"), str(folder / "run.json")]
        self.log = (folder / "log.txt").open("w")
        self.driver = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        request.addfinalizer(self.driver.kill)
        self.folder = folder
        self.saved_ever: set[int] = set()

    @property
    def said(self) -> str:
        return (self.folder / "log.txt").read_text()

    @property
    def steps(self) -> list[int]:
        """Steps in the order in which they were shown."""
        return [int(step) for step in re.findall(r"^step +(\d+)/", self.said, re.MULTILINE)]

    @property
    def workers(self) -> int:
        """How many made the first new step of the newest start that went on from a step."""
        return int((re.findall(r"first new one on (\d+) worker", self.said) or ["0"])[-1])

    def saved(self) -> set[int]:
        """Steps of complete checkpoints."""
        found = {int(path.parent.name[5:13]) for path in (self.folder / "runs").glob("tiny-*/checkpoints/*/manifest.json")}
        self.saved_ever |= found
        return found

    def goes_on(self) -> None:
        """Waits for some more steps."""
        last = max(self.steps)
        self.until(lambda: max(self.steps) > last + 5)

    def until(self, true: Callable[[], bool], seconds: float = 300) -> float:
        """Waits for it, while the driver lives; returns the seconds that it took."""
        began = time.monotonic()
        while not true():
            assert self.driver.poll() is None, self.said
            assert time.monotonic() - began < seconds, self.said
            self.saved()
            time.sleep(0.2)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs no workers; `nodes` adds those."""
    quick = {"RAY_worker_niceness": "0", "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quick.items():
            patch.setenv(name, value)
        made = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2**27}
        )
        try:
            yield made
        finally:
            made.shutdown()


def nodes(cluster: Cluster, count: int) -> list[Any]:
    """So many nodes with room for one worker each."""
    return [cluster.add_node(num_cpus=1, object_store_memory=2**27) for _ in range(count)]


def drain(cluster: Cluster, node: Any, seconds: int) -> None:
    """What Ray does when a pod gets SIGTERM: the node takes nothing new, and is gone after `seconds`."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]

    reason, deadline = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), int((time.time() + seconds) * 1000)
    assert GcsClient(address=cluster.address).drain_node(node.node_id, reason, "a test", deadline)[0]


def test_a_lost_node_is_done_without_one_that_comes_is_used_and_one_that_drains_is_saved_from(
    tmp_path: Path, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    values = settings(tmp_path, duration={"steps": 500}, checkpoint={"every_steps": 10})
    (tmp_path / "slow").touch()
    first, second = nodes(cluster, 2)
    run = Run(tmp_path, str(cluster.address), values, {"workers": 2, "min_workers": 1}, request)
    run.until(lambda: 15 in run.steps)

    cluster.remove_node(first, allow_graceful=False)
    print(f"lost node: {run.until(lambda: run.workers == 1):.1f} s until the first new step without it")
    run.goes_on()
    nodes(cluster, 1)
    print(f"new node: {run.until(lambda: run.workers == 2):.1f} s until the first new step with it")
    run.goes_on()
    before = run.saved()
    drain(cluster, second, 8)
    print(f"draining node: {run.until(lambda: any(step % 10 for step in run.saved() - before)):.1f} s to a checkpoint")
    print(f"and {run.until(lambda: run.workers == 1):.1f} s until the first new step without it")
    run.goes_on()
    (tmp_path / "slow").unlink()
    assert run.driver.wait(300) == 0, run.said

    [uri] = (tmp_path / "runs").glob("tiny-*")
    rows = [json.loads(line) for line in (uri / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 501))
    assert [workers for workers, _ in itertools.groupby(row["workers"] for row in rows)] == [2, 1, 2, 1]
    back = [(old, new) for old, new in itertools.pairwise(run.steps) if new != old + 1]
    (lost, found), (_, drained) = back  # growing has cost no step
    assert lost - found < 10
    assert found % 10 == 1
    assert drained - 1 in run.saved_ever
    told = json.loads((uri / "outcome.json").read_text())["starts"]
    assert [start["workers"] for start in told] == [2, 1, 2, 1]  # no start but those that a node made needful

    alone = run_processes(1, run_training, values | {"storage": {"uri": str(tmp_path / "alone")}})[0]
    undisturbed = [row["loss"] for row in alone["rows"] if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(undisturbed, rel=1e-4)  # sums in another order
    ours, theirs = weights(str(uri)), weights(alone["uri"])
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)


def test_all_nodes_that_drain_end_the_run_as_interrupted_within_their_time(
    tmp_path: Path, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    values = settings(tmp_path, duration={"steps": 500}, checkpoint={"every_steps": 1000})
    (tmp_path / "slow").touch()
    for node in cluster.worker_nodes.copy():
        cluster.remove_node(node)
    both = nodes(cluster, 2)
    run = Run(tmp_path, str(cluster.address), values, {"workers": 2}, request)
    run.until(lambda: 3 in run.steps)
    for node in both:
        drain(cluster, node, 60)
    began = time.monotonic()
    assert run.driver.wait(60) == 75, run.said
    print(f"{time.monotonic() - began:.1f} s from the notice to the end of the driver")
    [uri] = (tmp_path / "runs").glob("tiny-*")
    outcome = json.loads((uri / "outcome.json").read_text())
    assert outcome["outcome"] == "interrupted"
    assert run.saved() == {outcome["step"]}
    (tmp_path / "slow").unlink()
    rest = run_processes(2, run_training, values)[0]
    assert [row["step"] for row in rest["rows"] if "loss" in row] == list(range(outcome["step"] + 1, 501))
