"""Runs that take turns in environments/platform's queue, with room for one of them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from release import NAMESPACE, STEPS, Release, assert_complete, make_queue, settings, wait

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def queue(platform: None) -> str:
    """Name of the LocalQueue, with room for one run: head, two workers and submitter ask for 100m each."""
    return make_queue(NAMESPACE, cpu="500m", memory="12Gi")


@pytest.fixture
def releases(platform: None) -> Iterator[Callable[[str], Release]]:
    """Makes releases by name, gone with the test."""
    made: list[Release] = []

    def make(name: str) -> Release:
        made.append(Release(name))
        return made[-1]

    yield make
    for each in made:
        each.uninstall()


def install(release: Release, queue: str, steps: int = STEPS, **values: Any) -> None:
    account = {"create": False, "name": "default"}  # which is there before the check that goes first
    release.install(
        trainer=settings(release.name, duration={"steps": steps}), serviceAccount=account, queue={"name": queue} | values
    )


def test_of_two_runs_with_room_for_one_the_second_waits_without_a_pod_and_then_runs(queue, releases, report):
    first, second = releases("first"), releases("second")
    install(first, queue)
    first.wait_for_checkpoint()
    install(second, queue)
    wait("the second run to be held back", lambda: second.status().get("jobDeploymentStatus") == "Suspended", 60)
    while first.outcome()["outcome"] is None:
        assert [second.pods(component) for component in ("head", "worker", "submitter")] == [[], [], []]
        time.sleep(1)
    started = time.monotonic()
    first.wait_for_end()
    assert_complete(first, resumed_after=0)
    wait("a worker of the second run", lambda: second.pods("worker") != [])
    report(f"end of the first run to the second's workers: {time.monotonic() - started:.0f} s")
    second.wait_for_end()
    assert_complete(second, resumed_after=0)


def test_a_run_that_is_preempted_by_one_of_higher_priority_saves_and_resumes_after_it(queue, releases, undisturbed, report):
    low, high = releases("low"), releases("high")
    install(low, queue, check=False)
    step = low.wait_for_checkpoint()
    install(high, queue, steps=10, check=False, priorityClass="production")
    wait("outcome of the preempted run", lambda: low.outcome()["outcome"] == "interrupted")
    report(
        f"preempted after step {step}: step {low.outcome()['step']} saved {low.outcome()['save_seconds']} s after it was asked to"
    )
    assert high.wait_for_end()["jobStatus"] == "SUCCEEDED"
    low.wait_for_end()
    assert_complete(low, resumed_after=step)
    assert low.read("model/model.safetensors") == undisturbed.read("model/model.safetensors")
