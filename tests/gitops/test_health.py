"""What Argo CD makes of a RayJob's status, by a Lua interpreter in all tests, and by Argo CD itself where `make test-argocd` built it."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gitops import ARGOCD, ENVIRONMENTS, HEALTH, JOB_STATUSES, ROOT, load, rayjob
from lupa import lua51  # the language of Argo CD's own interpreter

SETTINGS = ENVIRONMENTS / "platform/argocd/argocd-cm.yaml"
KUBERAY_TYPES = "apis/ray/v1/rayjob_types.go"
Health = dict[str, str]
Assess = Callable[[dict[str, Any]], Health]


def by_lua(job: dict[str, Any]) -> Health:
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    lua.globals()["obj"] = lua.table_from(job, recursive=True)
    script = yaml.safe_load(SETTINGS.read_text())["data"]["resource.customizations.health.ray.io_RayJob"]
    health: Any = lua.execute(script)
    return {"status": health["status"], "message": health["message"]}


def by_argocd(tmp_path: Path) -> Assess:
    def assess(job: dict[str, Any]) -> Health:
        output = argocd("health", job, SETTINGS, tmp_path)
        found = re.fullmatch(r"STATUS: (\S+)\nMESSAGE: (.*)\n", output)
        assert found, output
        return {"status": found[1], "message": found[2]}

    return assess


def argocd(question: str, job: dict[str, Any], settings: Path, folder: Path) -> str:
    resource = folder / "rayjob.yaml"
    resource.write_text(yaml.safe_dump(job))
    command = [ARGOCD, "admin", "settings", "resource-overrides", question, resource, "--argocd-cm-path", settings]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_argocd = pytest.mark.skipif(not ARGOCD.exists(), reason="make test-argocd builds Argo CD")


@pytest.fixture(params=["lua", pytest.param("argocd", marks=needs_argocd)])
def assess(request: pytest.FixtureRequest, tmp_path: Path) -> Assess:
    return by_lua if request.param == "lua" else by_argocd(tmp_path)


def test_the_table_has_every_pair_of_statuses_that_kuberay_knows():
    source = kuberay_source(KUBERAY_TYPES)
    deployments = re.findall(r'\bJobDeploymentStatus = "(\w*)"', source)
    jobs = re.findall(r'\bJobStatus = "(\w*)"', source)
    assert len(deployments) == 10
    assert sorted(jobs) == sorted(JOB_STATUSES)
    assert sorted(HEALTH) == sorted((deployment, job) for deployment in deployments for job in jobs)


def kuberay_source(path: str) -> str:
    command = ["go", "mod", "download", "-json", "github.com/ray-project/kuberay/ray-operator"]
    result = subprocess.run(command, cwd=ROOT / "tests/tools/kuberay", capture_output=True, text=True, check=True)
    return (Path(json.loads(result.stdout)["Dir"]) / path).read_text()


@pytest.mark.parametrize(("deployment", "job"), HEALTH, ids=[f"{d or 'New'}-{j or 'none'}" for d, j in HEALTH])
def test_every_pair_of_statuses_has_its_health(assess, deployment, job):
    status = {"jobDeploymentStatus": deployment, "jobStatus": job}
    health = assess(rayjob({key: value for key, value in status.items() if value != ""}))
    assert health["status"] == HEALTH[deployment, job]
    assert health["message"]


def test_a_rayjob_that_kuberay_has_not_seen_yet_is_progressing(assess):
    assert assess(rayjob(None)) == {"status": "Progressing", "message": "KubeRay has not started it yet"}


def test_a_failure_says_its_reason_and_message(assess):
    status = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "exit code 1"}
    assert assess(rayjob(status)) == {"status": "Degraded", "message": "The run failed: AppFailed: exit code 1"}


def test_a_retry_says_which_one_it_is(assess):
    status = {"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED", "failed": 2, "reason": "AppFailed"}
    message = "Attempt 2 of 4 failed, the next one starts: AppFailed"
    assert assess(rayjob(status, retries=3)) == {"status": "Progressing", "message": message}


@pytest.mark.parametrize(("failed", "health"), [(0, "Progressing"), (2, "Progressing"), (3, "Degraded")])
def test_a_driver_that_failed_is_a_failure_only_when_no_retry_is_left(assess, failed, health):
    status = {"jobDeploymentStatus": "Running", "jobStatus": "FAILED", "failed": failed}
    assert assess(rayjob(status, retries=3))["status"] == health


@needs_argocd
def test_argocd_ignores_what_kueue_and_the_autoscaler_write_and_nothing_else(tmp_path):
    settings = load("platform/argocd/argocd-cm.yaml")
    entry = load("applicationset.yaml")["spec"]["template"]["spec"]["ignoreDifferences"][0]
    key = f"resource.customizations.ignoreDifferences.{entry['group']}_{entry['kind']}"
    settings["data"] = {key: yaml.safe_dump({"jsonPointers": entry["jsonPointers"]})}
    file = tmp_path / "argocd-cm.yaml"
    file.write_text(yaml.safe_dump(settings))
    job = rayjob(None)
    job["spec"] |= {"suspend": True, "rayClusterSpec": {"rayVersion": "2.58.0"}, "submitterPodTemplate": {"spec": {}}}
    output = argocd("ignore-differences", job, file, tmp_path)
    ignored = re.findall(r"^< +(\w+):", output, re.M)
    assert ignored == ["rayClusterSpec", "rayVersion", "submitterPodTemplate", "spec", "suspend"]
