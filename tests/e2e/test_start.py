"""Seconds from `helm install` to the first training step, in phases, beside a bare RayJob that only prints."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from release import Release, kubectl, pods, ready, wait

pytestmark = pytest.mark.full

BARE = "bare"


def phases(began: float, checks: dict[str, Callable[[], bool]]) -> dict[str, float]:
    """Seconds from `began` to when each of the checks, which come true in this order, has come true."""
    seconds = {}
    for what, check in checks.items():
        wait(what, check)
        seconds[what] = time.monotonic() - began
    return seconds


def log(selector: str) -> str:
    try:
        return kubectl("logs", "--selector", selector, "--tail=-1", "--container=submitter")
    except RuntimeError:  # it has not started
        return ""


def bare_job(release: Release) -> dict[str, Any]:
    """The release's RayJob with nothing of ours in it: a head and a submitter of the same image, and Ray's own ways."""
    job = next(each for each in release.objects if each["kind"] == "RayJob")
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    submitter = job["spec"]["submitterPodTemplate"]["spec"]["containers"][0]
    container = {"name": "ray-head", "securityContext": head["securityContext"] | {"readOnlyRootFilesystem": False}}
    container |= {"image": head["image"], "resources": head["resources"]}
    security = job["spec"]["submitterPodTemplate"]["spec"]["securityContext"]
    print_it = ["/submitter", "--", "echo", "printed"]
    follow = {
        "name": "submitter",
        "image": submitter["image"],
        "command": print_it,
        "securityContext": submitter["securityContext"],
    }
    spec = {
        "entrypoint": "echo printed",
        "shutdownAfterJobFinishes": True,
        "submitterPodTemplate": {"spec": {"restartPolicy": "OnFailure", "securityContext": security, "containers": [follow]}},
        "rayClusterSpec": {
            "rayVersion": job["spec"]["rayClusterSpec"]["rayVersion"],
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {
                    "metadata": {"labels": {"app": BARE}},
                    "spec": {"securityContext": security, "containers": [container]},
                },
            },
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": BARE}, "spec": spec}


def test_the_start_of_a_run_is_told_in_phases(release, report):
    began = time.monotonic()
    release.install()
    head, worker, submitter = map(release.selector, ("head", "worker", "submitter"))
    ours = phases(
        began,
        {
            "head pod there": lambda: pods(head) != [],
            "Ray ready on the head": lambda: ready(head) != [],
            "driver runs": lambda: "Running entrypoint" in log(submitter),
            "settings, data and storage checked": lambda: pods(worker) != [],
            "Ray ready on the workers": lambda: len(ready(worker)) == 2,
            "first step": lambda: re.search(r"step +1/", log(submitter)) is not None,
        },
    )
    job = bare_job(release)
    release.wait_for_end()
    release.uninstall()
    wait("end of the release's pods", lambda: release.pods("head") == [])
    began = time.monotonic()
    kubectl("create", "-f", "-", input=json.dumps(job))
    bare_head = f"app={BARE}"
    try:
        bare = phases(
            began,
            {
                "head pod there": lambda: pods(bare_head) != [],
                "Ray ready on the head": lambda: ready(bare_head) != [],
                "driver runs": lambda: "printed" in log(f"job-name={BARE}"),
            },
        )
    finally:
        kubectl("delete", "rayjob", BARE)
    report(f"{'seconds from helm install to':36} {'ours':>6} {'a bare RayJob':>14}")
    for what, seconds in ours.items():
        report(f"{what:36} {seconds:6.1f} {f'{bare[what]:14.1f}' if what in bare else ''}")
