"""Names, hashes and labels: what makes a run another run, and what every cluster accepts as a name."""

import re

import pytest
from chart import CPU, GPU, QUEUE, TRAINER, merged, only_in_long_runs, pod, render, run_file, run_name
from hypothesis import given, settings
from hypothesis import strategies as st

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
# What Helm itself takes as a release's name.
RELEASE = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?){0,2}", fullmatch=True)


def names_and_labels(objects):
    for kind, obj in objects.items():
        yield kind, obj["metadata"]["name"], obj["metadata"]["labels"]
    for role in ("head", "worker", "submitter", *(["check"] if "Job" in objects else [])):
        yield role, None, pod(objects, role)["metadata"]["labels"]


def assert_within_limits(objects):
    for kind, name, labels in names_and_labels(objects):
        if name is not None:
            assert DNS_1035.fullmatch(name), f"{kind} is named {name}"
            assert len(name) <= 47, f"{kind} is named {name}"
        for key, value in labels.items():
            assert LABEL.fullmatch(value), f"{kind} has {key}={value}"
            assert len(value) <= 63, f"{kind} has {key}={value}"


@settings(max_examples=only_in_long_runs(15), deadline=None)
@given(RELEASE.filter(lambda name: len(name) <= 53))
def test_names_and_labels_are_within_limits_for_any_release_name(release):
    assert_within_limits(render(merged(CPU, QUEUE), release=release))


@pytest.mark.parametrize(
    "release",
    ["7b-sft", "true", "1e6", "a.b", "x" * 53, "team-research-llama31-8b-instruct-sft-experiment", "0.9-" + "a" * 40],
)
def test_awkward_release_names_are_within_limits(release):
    assert_within_limits(render(CPU, release=release))


def test_release_names_that_have_to_be_cut_or_cleaned_stay_distinct():
    names = ["a" * 50 + "b", "a" * 50 + "c", "a.b", "a-b", "7b", "r-7b"]
    assert len({run_name(CPU, release=name).rpartition("-")[0] for name in names}) == len(names)


def test_a_short_release_name_is_kept():
    assert run_name(CPU, release="team-sft").startswith("team-sft-")


@pytest.mark.parametrize("override", ["fullnameOverride", "nameOverride"])
def test_overrides_reach_every_name(override):
    objects = render(merged(CPU, {override: "other"}))
    prefix = {"fullnameOverride": "other", "nameOverride": "demo-other"}[override]
    assert all(obj["metadata"]["name"].startswith(prefix) for obj in objects.values())


def test_the_same_values_give_the_same_names():
    assert render(GPU) == render(GPU)


MATTERS = {
    "a trainer setting": {"trainer": {"optim": {"lr": 1e-5}}},
    "the number of nodes": {"workers": {"nodes": 3}},
    "the instance type": {"workers": {"instanceType": "g6.24xlarge"}},
    "the image": {"image": {"tag": "other"}},
    "the digest": {"image": {"digest": "sha256:" + "0" * 64}},
    "the head's memory": {"head": {"memory": "9Gi"}},
    "an environment variable": {"env": {"NCCL_DEBUG": "WARN"}},
    "the submitter's image": {"submitter": {"image": None}},
    "rerun": {"lifecycle": {"rerun": "again"}},
    "the grace period": {"lifecycle": {"terminationGracePeriodSeconds": 200}},
    "the queue": QUEUE,
    "the queue's priority": merged(QUEUE, {"queue": {"priorityClass": "high"}}),
    "the node selector": {"workers": {"nodeSelector": {"pool": "a"}}},
    "the cache": {"modelCache": {"claim": "cache"}},
    "authentication": {"auth": {"mode": "disabled"}},
}


@pytest.mark.parametrize("change", MATTERS.values(), ids=MATTERS)
def test_what_changes_the_run_changes_its_name(change):
    assert run_name(merged(GPU, change)) != run_name(GPU)


EDITED_IN_PLACE = {
    "labels": {"podLabels": {"team": "research"}},
    "annotations": {"podAnnotations": {"note": "hello"}},
    "activeDeadlineSeconds": {"lifecycle": {"activeDeadlineSeconds": 86400}},
    "preRunningDeadlineSeconds": {"lifecycle": {"preRunningDeadlineSeconds": 600}},
    "backoffLimit": {"lifecycle": {"backoffLimit": 0}},
    "ttlSecondsAfterFinished": {"lifecycle": {"ttlSecondsAfterFinished": 0}},
    "global": {"global": {"team": "research"}},
    "the check before a queue": {"queue": {"check": False}},
}


@pytest.mark.parametrize("change", EDITED_IN_PLACE.values(), ids=EDITED_IN_PLACE)
def test_what_does_not_change_the_run_keeps_its_name(change):
    before, after = render(merged(GPU, QUEUE)), render(merged(GPU, QUEUE, change))
    assert after["RayJob"]["metadata"]["name"] == before["RayJob"]["metadata"]["name"]
    assert after["ConfigMap"]["metadata"]["name"] == before["ConfigMap"]["metadata"]["name"]


def test_an_upgrade_of_the_release_keeps_the_name():
    upgrade = render(GPU, arguments=("--is-upgrade",))
    assert upgrade["RayJob"]["metadata"]["name"] == run_name(GPU)


def test_the_run_file_is_immutable_named_by_its_content_and_mounted_by_that_name():
    before, after = render(GPU), render(merged(GPU, {"trainer": {"seed": 1}}))
    assert before["ConfigMap"]["immutable"] is True
    assert before["ConfigMap"]["metadata"]["name"] != after["ConfigMap"]["metadata"]["name"]
    for role in ("head", "worker"):
        volumes = {v["name"]: v for v in pod(after, role)["spec"]["volumes"]}
        assert volumes["run"]["configMap"]["name"] == after["ConfigMap"]["metadata"]["name"]


def test_the_run_file_names_the_release():
    assert run_file(render(CPU, release="team-sft", namespace="ml"))["release"] == {
        "name": "team-sft",
        "namespace": "ml",
    }


def test_no_trainer_setting_reaches_a_shell():
    hostile = 'Use `ls`; don\'t $(rm -rf /) && "quote" {"json": 1}\nnext line'
    objects = render(merged(CPU, {"trainer": merged(TRAINER, {"data": {"version": hostile}})}))
    assert run_file(objects)["trainer"]["data"]["version"] == hostile
    assert objects["RayJob"]["spec"]["entrypoint"] == "ray-finetune train --run /etc/ray-finetune/run.json"
    submitter = pod(objects, "submitter")["spec"]["containers"][0]
    assert [*submitter["command"], *submitter["args"]] == [
        "/submitter",
        "--",
        *["ray-finetune", "train", "--run", "/etc/ray-finetune/run.json"],
    ]
