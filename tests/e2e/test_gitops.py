"""`make gitops-e2e`: a commit, and the right thing happens, by Argo CD's own controllers on the cluster of this machine."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
import yaml
from release import Release, make_queue, wait

sys.path.append(str(cluster.ROOT / "tests/gitops"))
from argocd import NAMESPACE, ArgoCD

Report = Callable[[str], None]
IN_GIT = ("Synced", "Healthy")
# Long enough that a commit reaches it, by seed and name another run than those before it.
LONG = {"seed": 3, "duration": {"steps": 300}, "checkpoint": {"every_steps": 5}}


def merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in override.items() if isinstance(value, dict) and key in base}
    return base | override | both


def values(**override: Any) -> dict[str, Any]:
    """environments/smoke as it runs on this machine, with `override`."""
    smoke = yaml.safe_load((cluster.ROOT / "environments/smoke/values.yaml").read_text())
    here = yaml.safe_load((Path(__file__).parent / "values.yaml").read_text())
    return merged(merged(smoke, here), override)


@pytest.fixture(scope="module")
def argocd(platform: None, tmp_path_factory: pytest.TempPathFactory, report: Report) -> Iterator[ArgoCD]:
    """Argo CD, once the run of its first commit is complete."""
    argocd = ArgoCD(tmp_path_factory.mktemp("argocd"), values())
    try:
        started = time.monotonic()
        argocd.start()
        wait("complete first run", lambda: argocd.state() == IN_GIT)
        report(f"start of Argo CD to a complete first run: {time.monotonic() - started:.0f} s")
        yield argocd
    finally:
        argocd.stop()


def new_job(argocd: ArgoCD, before: set[str]) -> str:
    """The name of a RayJob that was not there before."""
    wait("new RayJob", lambda: bool(set(argocd.jobs()) - before), 180)
    [name] = set(argocd.jobs()) - before
    return name


def run_of(argocd: ArgoCD, job: str) -> Release:
    """What the run of a RayJob has left in the bucket."""
    volumes = argocd.jobs()[job]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    [name] = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    release = Release(job)
    release.objects = [json.loads(cluster.kubectl("get", "configmap", name, "--namespace", NAMESPACE, "--output", "json"))]
    return release


def names(kind: str) -> set[str]:
    """Of the environment's objects of a kind; of ConfigMaps, its run files."""
    found = cluster.kubectl("get", kind, "--namespace", NAMESPACE, "--output", "name").split()
    return {name for name in found if "kube-root-ca" not in name}


# ---- commits ----


def test_a_commit_becomes_a_run_that_ends_healthy_and_what_it_replaces_is_pruned(argocd, report):
    [first] = argocd.jobs()
    files = names("configmaps")
    committed = argocd.commit("Another seed", values(trainer={"seed": 2}))
    job = new_job(argocd, {first})
    report(f"commit to its RayJob: {time.monotonic() - committed:.0f} s")
    wait("complete run", lambda: argocd.state() == IN_GIT and set(argocd.jobs()) == {job})
    report(f"commit to Healthy: {time.monotonic() - committed:.0f} s")
    assert run_of(argocd, job).outcome()["outcome"] == "complete"
    wait("run file of the new run alone", lambda: len(names("configmaps")) == 1 and not names("configmaps") & files, 60)


def test_a_refused_run_is_degraded_and_a_revert_brings_the_complete_one_back(argocd, report):
    before = set(argocd.jobs())
    bad = {"seed": 2, "data": {"train": "s3://ray-finetune-smoke/data/bad.jsonl"}}
    committed = argocd.commit("Bad rows", values(trainer=bad))
    job = new_job(argocd, before)
    wait("Degraded Application", lambda: argocd.state() == ("Synced", "Degraded"))
    report(f"commit of bad rows to Degraded: {time.monotonic() - committed:.0f} s")
    assert "outcome.json" in argocd.reason()
    assert "bad.jsonl:1" in run_of(argocd, job).outcome()["cause"]
    reverted = argocd.revert()
    wait("earlier RayJob, alone", lambda: set(argocd.jobs()) == before, 180)
    wait("Healthy Application", lambda: argocd.state() == IN_GIT)
    report(f"git revert to Healthy, the run being complete already: {time.monotonic() - reverted:.0f} s")


def test_a_failed_run_is_degraded_with_kuberays_reason(argocd, report):
    before = set(argocd.jobs())
    deadlines = {"activeDeadlineSeconds": 60, "preRunningDeadlineSeconds": 59, "workersStartTimeoutSeconds": 59}
    committed = argocd.commit("Too little time", values(trainer=LONG | {"seed": 4}, lifecycle=deadlines))
    new_job(argocd, before)
    wait("Degraded Application", lambda: argocd.state() == ("Synced", "Degraded"))
    report(f"commit of a run with 60 s to live to Degraded: {time.monotonic() - committed:.0f} s")
    assert "The run failed: DeadlineExceeded" in argocd.reason()


def test_other_hardware_in_mid_run_saves_and_resumes(argocd, report):
    before = set(argocd.jobs())
    argocd.commit("A longer run", values(trainer=LONG))
    old = new_job(argocd, before)
    run = run_of(argocd, old)
    wait("checkpoint", lambda: bool(run.manifests()))
    before = set(argocd.jobs())
    committed = argocd.commit("One node", values(trainer=LONG, workers={"nodes": 1}))
    job = new_job(argocd, before)
    report(f"commit while it trains to the new RayJob: {time.monotonic() - committed:.0f} s")
    wait("attempt that resumes", lambda: any(each["attempt"] > 1 for each in run.manifests().values()))
    manifests = list(run.manifests().values())
    saved = max(each["step"] for each in manifests if each["attempt"] == 1)
    resumed_from = manifests[-1]["resumed_from"]
    assert resumed_from == saved < LONG["duration"]["steps"]
    wait("complete run", lambda: argocd.state() == IN_GIT and set(argocd.jobs()) == {job})
    report(f"step {saved} saved, resumed on the other hardware and complete: {time.monotonic() - committed:.0f} s after the commit")
    assert run.outcome()["outcome"] == "complete"
    assert run.steps() == list(range(1, LONG["duration"]["steps"] + 1))


# ---- what others write ----


def test_a_finished_runs_cluster_goes_after_its_ttl_and_nothing_is_made_again(argocd):
    [(job, before)] = argocd.jobs().items()
    argocd.commit("Gone sooner", values(trainer=LONG, workers={"nodes": 1}, lifecycle={"ttlSecondsAfterFinished": 1}))
    wait("edited RayJob", lambda: argocd.jobs()[job]["spec"]["ttlSecondsAfterFinished"] == 1, 180)
    wait("namespace without a RayCluster", lambda: names("rayclusters") == set(), 120)
    wait("Healthy Application", lambda: argocd.state() == IN_GIT, 120)
    [(same, after)] = argocd.jobs().items()
    assert (same, after["metadata"]["uid"]) == (job, before["metadata"]["uid"])
    assert names("rayclusters") == set()


def test_self_heal_mends_what_git_says_and_leaves_suspend_to_kueue(argocd, report):
    before = set(argocd.jobs())
    queue = make_queue(NAMESPACE, cpu="0")
    account = {"create": False, "name": "default"}  # which is there before the check that goes first
    queued = values(trainer={"seed": 5}, queue={"name": queue}, serviceAccount=account)
    argocd.commit("Through the queue", queued)
    job = new_job(argocd, before)
    wait("Suspended Application", lambda: argocd.state() == ("Synced", "Suspended"))
    patch = {"spec": {"backoffLimit": 7}, "metadata": {"labels": {"app.kubernetes.io/version": "none"}}}
    patched = time.monotonic()
    cluster.kubectl("patch", "rayjob", job, "--namespace", NAMESPACE, "--type", "merge", "--patch", json.dumps(patch))
    wait("mended RayJob", lambda: argocd.jobs()[job]["spec"]["backoffLimit"] == 3, 180)
    report(f"change by hand to self-heal: {time.monotonic() - patched:.0f} s")
    mended = argocd.jobs()[job]
    assert mended["metadata"]["labels"]["app.kubernetes.io/version"] != "none"
    assert mended["spec"]["suspend"] is True
    make_queue(NAMESPACE, cpu="1", memory="20Gi")
    wait("complete run", lambda: argocd.state() == IN_GIT)
    assert set(argocd.jobs()) == {job}
    assert run_of(argocd, job).outcome()["outcome"] == "complete"


# ---- what Argo CD must leave alone ----


def test_values_that_the_chart_refuses_leave_the_cluster_as_it_was(argocd, report):
    before = set(argocd.jobs())
    committed = argocd.commit("A misspelt key", values(workers={"node": 3}))
    # Argo CD takes what it had for three minutes, in case that Git or registry is away.
    wait("ComparisonError", lambda: "'node'" in json.dumps(argocd.application().get("conditions", [])), 600)
    report(f"commit that the chart refuses to a ComparisonError with its sentence: {time.monotonic() - committed:.0f} s")
    assert set(argocd.jobs()) == before
    argocd.revert()
    wait("end of the refusal", lambda: not argocd.application().get("conditions") and argocd.state() == IN_GIT, 180)


def test_nothing_flaps_in_ten_minutes(argocd, report):
    jobs = {name: job["metadata"]["uid"] for name, job in argocd.jobs().items()}
    looks, deadline = 0, time.monotonic() + 600
    while time.monotonic() < deadline:
        assert argocd.state() == IN_GIT
        looks += 1
        time.sleep(2)
    assert {name: job["metadata"]["uid"] for name, job in argocd.jobs().items()} == jobs
    report(f"Synced and Healthy in each of {looks} looks of ten minutes")
