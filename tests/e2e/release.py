"""A Helm release of environments/smoke on the cluster, and what its run leaves in the bucket."""

import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import cluster
import yaml

from trainer.config import RunFile

BUCKET = "ray-finetune-smoke"
NAMESPACE = "e2e"
VALUES = [cluster.ROOT / "environments/smoke/values.yaml", Path(__file__).parent / "values.yaml"]
STEPS = 60
# The securityContext of a container that the namespace accepts.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def settings(name: str, **sections: Any) -> dict[str, Any]:
    """Of a run that is under way long enough to be disturbed. Runs of other names have the same rows, steps and weights."""
    return {"name": name, "duration": {"steps": STEPS}, "checkpoint": {"every_steps": 5}} | sections


def s3_client() -> Any:
    keys = {"aws_access_key_id": cluster.S3["access"], "aws_secret_access_key": cluster.S3["secret"]}
    return boto3.client("s3", endpoint_url=cluster.S3["endpoint"], region_name="us-east-1", **keys)


class Release:
    def __init__(self, name: str):
        self.name = name
        self.s3 = s3_client()
        self.objects: list[dict[str, Any]] = []

    def install(self, **values: Any) -> None:
        """`helm upgrade --install`, with `values` over those of the environment."""
        files = [argument for path in VALUES for argument in ("--values", path)]
        chart = cluster.ROOT / "charts/ray-finetune"
        helm("upgrade", "--install", self.name, chart, *files, "--values", "-", input=json.dumps(values))
        self.objects = list(yaml.safe_load_all(helm("get", "manifest", self.name)))

    def uninstall(self) -> None:
        helm("uninstall", self.name, "--ignore-not-found", "--wait", "--timeout", "3m")

    # ---- in the cluster ----

    @property
    def job(self) -> str:
        """Name of the release's RayJob."""
        return next(each["metadata"]["name"] for each in self.objects if each["kind"] == "RayJob")

    def status(self) -> dict[str, Any]:
        return json.loads(kubectl("get", "rayjob", self.job, "--output", "json")).get("status", {})

    def selector(self, component: str) -> str:
        """Of the pods of `head`, `worker` or `submitter`."""
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"

    def pods(self, component: str) -> list[str]:
        return pods(self.selector(component))

    def worker_pods_ever(self) -> set[str]:
        """Names of all worker pods that this RayJob's clusters have ever had, from the cluster's events."""
        events = json.loads(kubectl("get", "events", "--output", "json"))["items"]
        names = {event["involvedObject"]["name"] for event in events if event["involvedObject"]["kind"] == "Pod"}
        return {name for name in names if name.startswith(self.job) and "-workers-" in name}

    def wait_for_end(self, seconds: float = 500) -> dict[str, Any]:
        """The RayJob's status once it has ended."""
        wait("the job's end", lambda: self.status().get("jobDeploymentStatus") in ("Complete", "Failed"), seconds)
        return self.status()

    # ---- in the bucket ----

    @property
    def run(self) -> RunFile:
        return next(RunFile.model_validate_json(each["data"]["run.json"]) for each in self.objects if each["kind"] == "ConfigMap")

    def written(self) -> dict[str, datetime]:
        """The keys of the run's folder, with the time that each was written."""
        prefix = self.run.uri.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"].removeprefix(prefix): each["LastModified"] for page in pages for each in page.get("Contents", [])}

    def read(self, key: str) -> bytes:
        prefix = self.run.uri.removeprefix(f"s3://{BUCKET}/")
        return self.s3.get_object(Bucket=BUCKET, Key=f"{prefix}/{key}")["Body"].read()

    def outcome(self) -> dict[str, Any]:
        """How the run ended; `outcome` is None where it has not."""
        return json.loads(self.read("outcome.json")) if "outcome.json" in self.written() else {"outcome": None}

    def manifests(self) -> dict[str, dict[str, Any]]:
        """The manifests of the complete checkpoints by key, oldest first."""
        keys = sorted(key for key in self.written() if key.endswith("/manifest.json"))
        return {key: json.loads(self.read(key)) for key in keys}

    def steps(self) -> list[int]:
        """The steps of metrics.jsonl."""
        rows = map(json.loads, self.read("metrics.jsonl").splitlines())
        return [row["step"] for row in rows if "loss" in row]

    def wait_for_checkpoint(self, after: int = 0) -> int:
        """The newest checkpoint's step, once there is one beyond the step `after`."""
        newest = lambda: max((each["step"] for each in self.manifests().values()), default=0)  # noqa: E731
        wait(f"a checkpoint after step {after}", lambda: newest() > after)
        return newest()


def assert_complete(release: Release, resumed_after: int) -> None:
    """The run has all its steps, and its last attempt went on from `resumed_after` or a later checkpoint."""
    assert release.status()["jobStatus"] == "SUCCEEDED"
    assert release.outcome()["outcome"] == "complete"
    newest = list(release.manifests().values())[-1]
    assert newest["step"] == STEPS and newest["resumed_from"] >= resumed_after
    assert release.steps() == list(range(1, STEPS + 1))


def wait(what: str, check: Callable[[], bool], seconds: float = 500) -> float:
    """The seconds that `check` took to come true; an AssertionError after `seconds`."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"no {what} after {seconds:.0f} s"
        time.sleep(0.5)
    return time.monotonic() - started


def pods(selector: str) -> list[str]:
    """Names of those that are there, as `pod/NAME`."""
    return kubectl("get", "pods", "--selector", selector, "--output", "name").split()


def ready(selector: str) -> list[str]:
    """Names of those whose containers are all ready."""
    items = json.loads(kubectl("get", "pods", "--selector", selector, "--output", "json"))["items"]
    conditions = {
        pod["metadata"]["name"]: {each["type"]: each["status"] for each in pod["status"].get("conditions", [])} for pod in items
    }
    return [name for name, states in conditions.items() if states.get("Ready") == "True"]


def objects() -> set[str]:
    """Names of all that the chart or the operator may make in the namespace."""
    kinds = "rayjobs,rayclusters,jobs,pods,configmaps,serviceaccounts,networkpolicies,secrets,services,roles,rolebindings"
    return set(kubectl("get", kinds, "--output", "name").split())


def make_namespace(name: str) -> None:
    """One that takes restricted pods alone, with the S3 server's keys."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    keys = {"AWS_ACCESS_KEY_ID": cluster.S3["access"], "AWS_SECRET_ACCESS_KEY": cluster.S3["secret"], "AWS_REGION": "us-east-1"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3", "namespace": name}, "stringData": keys}
    for each in (namespace, secret):
        cluster.kubectl("apply", "-f", "-", input=json.dumps(each))


def make_queue(namespace: str, **room: str) -> str:
    """environments/platform's queue with a quota such as cpu="500m"; returns the name of its LocalQueue in the namespace."""
    objects = list(yaml.safe_load_all((cluster.ROOT / "environments/platform/queues/queues.yaml").read_text()))
    for each in objects:
        if each["kind"] == "LocalQueue":
            each["metadata"]["namespace"] = namespace
        elif each["kind"] == "ClusterQueue":
            for resource in [resource for group in each["spec"]["resourceGroups"] for resource in group["flavors"][0]["resources"]]:
                resource["nominalQuota"] = room.get(resource["name"], resource["nominalQuota"])
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
    [name] = {each["metadata"]["name"] for each in objects if each["kind"] == "LocalQueue"}
    return name


def helm(*arguments: Any, input: str | None = None) -> str:
    return cluster.run(cluster.BIN / "helm", "--kubeconfig", cluster.KUBECONFIG, "--namespace", NAMESPACE, *arguments, input=input)


def kubectl(*arguments: Any, input: str | None = None) -> str:
    return cluster.kubectl("--namespace", NAMESPACE, *arguments, input=input)
