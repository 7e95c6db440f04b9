"""What the tests of environments/ share: the files as objects, and the RayJob statuses that Argo CD may meet."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "environments"
ARGOCD = ROOT / ".tools/bin/argocd"

JOB_STATUSES = ["", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
# One row for each jobDeploymentStatus of KubeRay, one column for each jobStatus, in the order above.
TABLE = """
New               Progressing Progressing Progressing Degraded    Progressing Degraded
Initializing      Progressing Progressing Progressing Degraded    Progressing Degraded
Running           Progressing Progressing Progressing Degraded    Progressing Degraded
Complete          Degraded    Degraded    Degraded    Degraded    Healthy     Degraded
Failed            Degraded    Degraded    Degraded    Degraded    Degraded    Degraded
ValidationFailed  Degraded    Degraded    Degraded    Degraded    Degraded    Degraded
Suspending        Progressing Progressing Progressing Progressing Progressing Progressing
Suspended         Suspended   Suspended   Suspended   Suspended   Suspended   Suspended
Retrying          Progressing Progressing Progressing Progressing Progressing Progressing
Waiting           Progressing Progressing Progressing Degraded    Progressing Degraded
"""
HEALTH = {
    ("" if row.split()[0] == "New" else row.split()[0], job): health
    for row in TABLE.strip().splitlines()
    for job, health in zip(JOB_STATUSES, row.split()[1:], strict=True)
}


def load(path: str) -> dict[str, Any]:
    return yaml.safe_load((ENVIRONMENTS / path).read_text())


def rayjob(status: dict[str, Any] | None, retries: int = 0) -> dict[str, Any]:
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "sft", "namespace": "training"}}
    return {**job, "spec": {"backoffLimit": retries}, **({} if status is None else {"status": status})}
