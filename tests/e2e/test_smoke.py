"""environments/smoke on a real Kubernetes: KubeRay's operator, containers of the image, an S3 server."""

import time
from typing import Any

import torch
from release import BUCKET, Release, kubectl, wait
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 60


def settings(name: str, **sections: Any) -> dict[str, Any]:
    """Of a run that is under way long enough to be disturbed."""
    return {"name": name, "duration": {"steps": STEPS}, "checkpoint": {"every_steps": 5}} | sections


def assert_complete(release: Release, resumed_after: int) -> None:
    """The run has all its steps, and its last attempt went on from `resumed_after` or a later checkpoint."""
    assert release.status()["jobStatus"] == "SUCCEEDED"
    assert release.outcome()["outcome"] == "complete"
    newest = list(release.manifests().values())[-1]
    assert newest["step"] == STEPS and newest["resumed_from"] >= resumed_after
    assert release.steps() == list(range(1, STEPS + 1))


def test_a_release_trains_from_s3_to_s3_and_its_model_loads(release, tmp_path, report):
    started = time.monotonic()
    release.install()
    assert release.wait_for_end()["jobStatus"] == "SUCCEEDED"
    report(f"helm install to the end of {release.run.trainer.duration.steps} steps: {time.monotonic() - started:.0f} s")
    assert release.outcome()["outcome"] == "complete"
    for key in release.written():
        if key.startswith("model/"):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(release.read(key))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "red"}], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert torch.isfinite(model(answer).logits).all()

    release.install(lifecycle={"rerun": "again"})  # another RayJob of the same run
    assert release.wait_for_end()["jobStatus"] in ("SUCCEEDED", "STOPPED")
    assert release.worker_pods_ever() == set(), "a complete run needs no worker"


def test_an_upgrade_of_the_hardware_alone_resumes(release, report):
    release.install(trainer=settings("upgraded"))
    step = release.wait_for_checkpoint()
    release.install(trainer=settings("upgraded"), workers={"nodes": 1})
    release.wait_for_end()
    assert_complete(release, resumed_after=step)


def test_uninstall_saves_in_time_leaves_nothing_behind_and_install_resumes(release, report):
    release.install(trainer=settings("uninstalled"))
    step = release.wait_for_checkpoint()
    started = time.time()
    release.uninstall()
    report(f"helm uninstall: {time.time() - started:.0f} s")
    seconds = wait("saved run", lambda: release.outcome()["outcome"] == "interrupted", 60)
    key, newest = list(release.manifests().items())[-1]
    report(
        f"helm uninstall to the checkpoint's manifest: {release.written()[key].timestamp() - started:.1f} s, outcome {seconds:.0f} s later"
    )
    assert newest["step"] >= step
    wait("namespace without pods", lambda: not kubectl("get", "pods", "--output", "name").split(), 90)
    kinds = "rayjobs,rayclusters,jobs,configmaps,serviceaccounts,networkpolicies,secrets,services"
    left = kubectl("get", kinds, "--output", "name").split()
    assert set(left) == {"configmap/kube-root-ca.crt", "serviceaccount/default", "secret/s3"}

    release.install(trainer=settings("uninstalled"))
    release.wait_for_end()
    assert_complete(release, resumed_after=newest["step"])


def test_a_run_survives_the_loss_of_its_head(release, report):
    release.install(trainer=settings("headless"))
    step = release.wait_for_checkpoint()
    [head] = release.pods("head")
    started = time.monotonic()
    kubectl("delete", head, "--wait=false")
    release.wait_for_checkpoint(after=step + 5)
    report(f"head deleted to a checkpoint beyond: {time.monotonic() - started:.0f} s")
    release.wait_for_end()
    assert_complete(release, resumed_after=step)


def test_bad_data_creates_no_worker_pod(release):
    release.install(trainer=settings("bad", data={"train": f"s3://{BUCKET}/data/bad.jsonl"}))
    release.wait_for_end()
    outcome = release.outcome()
    assert outcome["outcome"] == "refused" and "bad.jsonl:1" in outcome["cause"]
    assert release.worker_pods_ever() == set()
