"""environments/smoke on a real Kubernetes: KubeRay's operator, containers of the image, an S3 server."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from release import BUCKET, Release, assert_complete, kubectl, objects, settings, wait
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_release_trains_from_s3_to_s3_and_its_model_loads(undisturbed, tmp_path):
    assert_complete(undisturbed, resumed_after=0)
    download_model(undisturbed, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "red"}], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert torch.isfinite(model(answer).logits).all()


def download_model(release: Release, folder: Path) -> None:
    for key in release.written():
        if key.startswith("model/"):
            (folder / key.removeprefix("model/")).write_bytes(release.read(key))


def test_a_complete_run_that_is_created_again_ends_without_a_worker_pod(undisturbed):
    undisturbed.install(trainer=settings("undisturbed"), lifecycle={"rerun": "again"})
    assert undisturbed.wait_for_end()["jobStatus"] in ("SUCCEEDED", "STOPPED")
    assert undisturbed.outcome()["outcome"] == "complete"
    assert undisturbed.worker_pods_ever() == set()


def test_bad_data_is_refused_without_a_worker_pod(release):
    release.install(trainer=settings("bad", data={"train": f"s3://{BUCKET}/data/bad.jsonl"}))
    release.wait_for_end()
    outcome = release.outcome()
    assert outcome["outcome"] == "refused" and "bad.jsonl:1" in outcome["cause"]
    assert release.worker_pods_ever() == set()


# ---- disturbed ----


def test_an_upgrade_of_the_hardware_alone_resumes(release, report):
    release.install(trainer=settings("upgraded"))
    step = release.wait_for_checkpoint()
    started = time.monotonic()
    release.install(trainer=settings("upgraded"), workers={"nodes": 1})
    release.wait_for_end()
    report(f"helm upgrade after step {step} to the end: {time.monotonic() - started:.0f} s")
    assert_complete(release, resumed_after=step)


class Uninstalled(NamedTuple):
    release: Release
    before: set[str]
    """What the namespace held before the installation."""
    step: int
    """Of the newest checkpoint before the uninstallation."""
    began: float
    """When it began, in seconds since 1970."""


@pytest.fixture(scope="module")
def uninstalled(platform: None) -> Iterator[Uninstalled]:
    """A release that was uninstalled while its run was under way."""
    release, before = Release("uninstalled"), objects()
    release.install(trainer=settings("uninstalled"))
    step, began = release.wait_for_checkpoint(), time.time()
    release.uninstall()
    yield Uninstalled(release, before, step, began)
    release.uninstall()


def test_uninstall_saves_in_time_and_leaves_nothing_behind(uninstalled, report):
    release = uninstalled.release
    wait("outcome of the run", lambda: release.outcome()["outcome"] == "interrupted", 90)
    key, newest = list(release.manifests().items())[-1]
    assert newest["step"] >= uninstalled.step
    saved, left = (release.written()[name].timestamp() - uninstalled.began for name in (key, "outcome.json"))
    report(
        f"helm uninstall after step {uninstalled.step} to step {newest['step']} saved: {saved:.1f} s, to its outcome: {left:.1f} s"
    )
    assert left < 60, "terminationGracePeriodSeconds"
    wait("namespace as it was before", lambda: objects() <= uninstalled.before, 120)


def test_an_installation_after_that_resumes(uninstalled, report):
    started = time.monotonic()
    uninstalled.release.install(trainer=settings("uninstalled"))
    uninstalled.release.wait_for_end()
    report(f"helm install once more to the end: {time.monotonic() - started:.0f} s")
    assert_complete(uninstalled.release, resumed_after=uninstalled.step)


def test_a_run_survives_the_loss_of_its_head_and_ends_in_the_undisturbed_runs_weights(release, undisturbed, report):
    release.install(trainer=settings("headless"))
    step = release.wait_for_checkpoint()
    [head] = release.pods("head")
    started = time.monotonic()
    kubectl("delete", head, "--wait=false")
    release.wait_for_end()
    report(f"head deleted after step {step} to the end: {time.monotonic() - started:.0f} s")
    assert_complete(release, resumed_after=step)
    assert release.read("model/model.safetensors") == undisturbed.read("model/model.safetensors")
