"""Runs kube-score over what each environment renders to: as a run, as a run with a queue, and as the test of EFA.

    python tests/chart/score.py

kube-score knows no RayJob, so head, worker and submitter stand beside the objects as Pods. Every check of it is on, and
every finding is either mended in the chart or answered here; an answer that nothing asks for any more is an error, too.
"""

import json
import subprocess
import sys
from typing import Any

import yaml
from chart import ENVIRONMENTS, ROOT, helm_template, parse, pod, tool

VARIANTS = {
    "a run": [],
    "a run with a queue": ["--set=queue.name=gpus,serviceAccount.create=false,serviceAccount.name=trainer"],
    "the test of EFA": ["--set=efa.test=true"],
}
# (check, kind of pod or "all", what it finds) -> why the chart leaves it so
ANSWERS = {
    ("container-security-context-user-group-id", "all", "The container is running with a low user ID"): (
        "1000 is the image's user; a high one keeps a pod from a host's files, and no pod of the chart mounts any"
    ),
    ("container-security-context-user-group-id", "all", "The container running with a low group ID"): "as the user",
    ("container-image-pull-policy", "all", "ImagePullPolicy is not set to Always"): (
        "a release's tag never moves, image.digest pins harder, and a pull of gigabytes is not free; image.pullPolicy can say Always"
    ),
    ("container-ephemeral-storage-request-and-limit", "all", "Ephemeral Storage limit is not set"): (
        "a pod over such a limit is evicted, its run with it; modelCache.size limits the cache"
    ),
    ("container-ephemeral-storage-request-and-limit", "all", "Ephemeral Storage request is not set"): (
        "how much a run needs depends on its model; workers.disk asks for it"
    ),
    ("pod-networkpolicy", "all", "The pod does not have a matching egress NetworkPolicy"): (
        "storage, Hub and STS have no fixed addresses"
    ),
    ("pod-networkpolicy", "efa-test", "The pod does not have a matching NetworkPolicy"): (
        "it is one process without a server; the policy is part of a run"
    ),
    ("container-cpu-requests-equal-limits", "submitter", "CPU requests does not match limits"): (
        "it sleeps between two lines of the log, so a node need not keep a CPU for it"
    ),
    ("container-resource-requests-equal-limits", "submitter", "CPU requests does not match limits"): "as above",
}

Finding = tuple[str, str, str]


def pods_of_the_rayjob(objects: dict[str, Any]) -> list[dict[str, Any]]:
    if "RayJob" not in objects:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", **pod(objects, role)} for role in ("head", "worker", "submitter")]


def findings(manifest: str) -> set[Finding]:
    """(check, component, what it finds) of all that kube-score does not take for good."""
    objects = parse(manifest)
    pods = pods_of_the_rayjob(objects)
    for one in pods:
        one["metadata"]["name"] = one["metadata"]["labels"]["app.kubernetes.io/component"]
    text = yaml.safe_dump_all([*(o for kind, o in objects.items() if kind != "RayJob"), *pods])
    command = [
        tool("kube-score"),
        "score",
        "-",
        "--output-format",
        "json",
        "--all-default-optional",
        "--kubernetes-version",
        "v1.34",
    ]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    scored = json.loads(result.stdout)
    assert len(scored) >= len(pods) + 1, result.stderr
    return {
        (check["check"]["id"], component(one["object_name"]), comment["summary"])
        for one in scored
        for check in one["checks"]
        if check["grade"] < 10 and not check["skipped"]
        for comment in check["comments"] or []
    }


def component(name: str) -> str:
    """`Job/batch/v1//ray-finetune-efa-test` is the efa-test."""
    return name.rpartition("/")[2].removeprefix("ray-finetune-")


def answer(finding: Finding) -> Finding | None:
    check, where, what = finding
    return next((key for key in ((check, "all", what), (check, where, what)) if key in ANSWERS), None)


def main() -> int:
    asked: set[Finding] = set()
    open_findings = set()
    for environment in ENVIRONMENTS:
        for variant, arguments in VARIANTS.items():
            rendered = helm_template(
                ROOT / "environments" / environment / "values.yaml", release="ray-finetune", arguments=tuple(arguments)
            )
            if rendered.returncode and variant == "the test of EFA" and "workers ask for no EFA interface" in rendered.stderr:
                continue
            assert rendered.returncode == 0, rendered.stderr
            for finding in findings(rendered.stdout):
                key = answer(finding)
                if key:
                    asked.add(key)
                else:
                    open_findings.add((environment, variant, *finding))
    for line in sorted(open_findings):
        print("{}, {}: {} of {}: {}".format(*line))
    stale = [key for key in ANSWERS if key not in asked]
    for key in stale:
        print(f"nothing asks for the answer to {key} any more: leave it out of tests/chart/score.py")
    if not open_findings and not stale:
        print(f"kube-score: {len(ENVIRONMENTS)} environments, nothing unanswered; {len(asked)} kinds of findings are answered")
    return int(bool(open_findings or stale))


if __name__ == "__main__":
    sys.exit(main())
