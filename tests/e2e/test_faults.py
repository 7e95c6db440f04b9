"""What may happen to a run on a cluster: pods, processes and the S3 server go, and it still ends with all its steps."""

import json
import time
from collections.abc import Callable

import cluster
import pytest
from release import NAMESPACE, Release, assert_complete, kubectl, settings, wait

pytestmark = pytest.mark.full

KILL_WORKER = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{pid}/cmdline").read().startswith("ray::RayTrainWorker"):
        os.kill(int(pid), signal.SIGKILL)
        print("killed", pid)
"""
OUTAGE_SECONDS = 30


@pytest.fixture
def under_way(release: Release, request: pytest.FixtureRequest) -> Release:
    """A release whose run has a checkpoint."""
    release.install(trainer=settings(f"faults-{release.name}"))
    release.wait_for_checkpoint()
    return release


def assert_ends_well(release: Release, undisturbed: Release, step: int) -> None:
    """Complete, from a checkpoint at `step` or later, with the weights of the undisturbed run, which had as many workers."""
    release.wait_for_end()
    assert_complete(release, resumed_after=step)
    assert release.read("model/model.safetensors") == undisturbed.read("model/model.safetensors")


def test_a_worker_pod_that_is_deleted_is_replaced(under_way, undisturbed, report):
    step, started = under_way.wait_for_checkpoint(), time.monotonic()
    # At once, as a node goes: in its grace period the run would save, and might be complete before it is over.
    kubectl("delete", under_way.pods("worker")[0], "--wait=false", "--grace-period=1")
    assert_ends_well(under_way, undisturbed, step)
    report(f"worker pod deleted after step {step} to the end: {time.monotonic() - started:.0f} s")


def test_a_worker_process_that_is_killed_is_started_again_in_its_pod(under_way, undisturbed, report):
    step, started = under_way.wait_for_checkpoint(), time.monotonic()
    pods = set(under_way.pods("worker"))
    said = kubectl("exec", under_way.pods("worker")[0], "--container", "ray-worker", "--", "python", "-c", KILL_WORKER)
    assert "killed" in said
    assert_ends_well(under_way, undisturbed, step)
    report(f"worker process killed after step {step} to the end: {time.monotonic() - started:.0f} s")
    assert {f"pod/{name}" for name in under_way.worker_pods_ever()} == pods


@pytest.fixture
def outage() -> Callable[[], None]:
    """Stops the S3 server and starts it again half a minute later."""

    def strike() -> None:
        cluster.stop_s3()
        time.sleep(OUTAGE_SECONDS)
        cluster.start_s3()

    return strike


def test_an_s3_server_that_is_gone_for_a_while_costs_nothing_but_time(under_way, undisturbed, outage, report):
    started = time.monotonic()
    outage()
    assert_ends_well(under_way, undisturbed, step=0)
    report(f"S3 server gone for {OUTAGE_SECONDS} s to the end: {time.monotonic() - started:.0f} s")


def test_pods_that_are_evicted_from_a_cordoned_node_save_and_go_on_when_there_is_room_again(under_way, undisturbed, report):
    step, started = under_way.wait_for_checkpoint(), time.monotonic()
    kubectl("cordon", cluster.NODE)
    try:
        for pod in [*under_way.pods("worker"), *under_way.pods("head")]:
            name = pod.removeprefix("pod/")
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
            kubectl(
                "create", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", "-f", "-", input=json.dumps(eviction)
            )
        wait("outcome of the run", lambda: under_way.outcome()["outcome"] == "interrupted", 120)
        report(f"evicted after step {step} to its outcome: {time.monotonic() - started:.0f} s")
    finally:
        kubectl("uncordon", cluster.NODE)
    assert_ends_well(under_way, undisturbed, step)
    report(f"evicted to the end: {time.monotonic() - started:.0f} s")
