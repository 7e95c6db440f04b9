"""What cannot work is refused at render, by a sentence that names the key and says what to write."""

import pytest
from chart import CPU, GPU, TRAINER, container, env, merged, refusal, render, run_file

NEEDS_FIGURES = {"trainer": TRAINER, "workers": {"instanceType": "g9.4xlarge", "cpu": 8, "memory": "16Gi", "gpus": 2}}
ONE_GPU = {"trainer": TRAINER, "workers": {"instanceType": "g6.xlarge", "nodes": 2}}

REFUSED = {
    # key and values -> what the message must hold
    "gpus": (GPU, {"workers": {"gpus": 8}}, ["workers.gpus is 8", "g6.12xlarge has 4", "at most 4"]),
    "efa": (GPU, {"workers": {"efa": 4}}, ["workers.efa is 4", "g6.12xlarge has 1", "at most 1"]),
    "EFA interfaces of a type without": (
        ONE_GPU,
        {"workers": {"efa": 1}},
        ["workers.efa is 1, but a g6.xlarge has no EFA interface: write 0, or leave it out"],
    ),
    "cpu": (GPU, {"workers": {"cpu": 48}}, ["workers.cpu is 48", "leaves 47810m", "at most 47", "for 46"]),
    "memory": (
        GPU,
        {"workers": {"memory": "192Gi"}},
        ["workers.memory is 192Gi", "178933Mi", "at most 174Gi", "for 159Gi"],
    ),
    "cpu per GPU": (GPU, {"workers": {"cpu": 3}}, ["workers.cpu is 3", "4 GPUs", "at least 4"]),
    "shm": (GPU, {"workers": {"shm": "170Gi"}}, ["workers.shm is 170Gi", "159Gi"]),
    "GPU memory": (GPU, {"workers": {"gpuMemoryGiB": 24}}, ["workers.gpuMemoryGiB is 24", "g6.12xlarge has 22"]),
    "EFA where there is none": (
        ONE_GPU,
        {"efa": {"required": True}},
        ["efa.required is true", "g6.xlarge has no EFA", "g6.8xlarge"],
    ),
    "EFA switched off and required": (GPU, {"efa": {"required": True}, "workers": {"efa": 0}}, ["workers.efa is 0"]),
    "EFA without GPUs": (GPU, {"workers": {"gpus": 0}}, ["workers.efa is 1", "workers.gpus is 0"]),
    "EFA without an instance type": (
        CPU,
        {"efa": {"required": True}},
        ["efa.required is true", "workers.instanceType"],
    ),
    "an unknown type": (
        {"trainer": TRAINER},
        {"workers": {"instanceType": "g6.13xlarge"}},
        ["workers.instanceType is g6.13xlarge, which the chart does not know: write g6.12xlarge if", "workers.cpu, workers.memory"],
    ),
    "its GPUs": (
        {"trainer": TRAINER},
        {"workers": {"instanceType": "g9.4xlarge", "cpu": 8, "memory": "16Gi"}},
        ["workers.instanceType is g9.4xlarge", "add what it has as workers.gpus (0 where it has none)"],
    ),
    "its GPU memory": (NEEDS_FIGURES, {}, ["workers.instanceType is g9.4xlarge", "add what it has as workers.gpuMemoryGiB"]),
    "GPUs of no type": (
        CPU,
        {"workers": {"gpus": 1}},
        ["workers.gpuMemoryGiB must be set, since workers.instanceType is not set"],
    ),
    "no type, no memory": (
        {"trainer": TRAINER},
        {"workers": {"cpu": 2}},
        ["workers.memory must be set", "workers.instanceType is not set"],
    ),
    "a local storage folder": (CPU, {"trainer": {"storage": {"uri": "runs"}}}, ["trainer.storage.uri", "s3://"]),
    "odd huge pages": (
        GPU,
        {"workers": {"hugepages2Mi": "5121Mi"}},
        ["workers.hugepages2Mi is 5121Mi", "multiple of 2Mi"],
    ),
    "TCP where EFA is required": (GPU, {"env": {"NCCL_NET": "Socket"}}, ['env.NCCL_NET is "Socket"', "efa.required to false"]),
    "locked memory without EFA": (CPU, {"efa": {"lockMemory": True}}, ["efa.lockMemory is true"]),
    "RDMA on g5": (
        merged(GPU, {"workers": {"instanceType": "g5.12xlarge"}}),
        {"env": {"FI_EFA_USE_DEVICE_RDMA": 1}},
        ["env.FI_EFA_USE_DEVICE_RDMA", "g5.12xlarge"],
    ),
    "a deadline beyond the run's": (
        CPU,
        {"lifecycle": {"activeDeadlineSeconds": 1800}},
        ["lifecycle.preRunningDeadlineSeconds is 1800"],
    ),
    "a start beyond the run's": (
        CPU,
        {"lifecycle": {"activeDeadlineSeconds": 2000, "workersStartTimeoutSeconds": 3000}},
        ["lifecycle.workersStartTimeoutSeconds is 3000"],
    ),
    "a priority without a queue": (
        CPU,
        {"queue": {"priorityClass": "high"}},
        ["queue.priorityClass", "set queue.name"],
    ),
    "a topology without a queue": (
        CPU,
        {"queue": {"requiredTopology": "topology.kubernetes.io/zone"}},
        ["queue.requiredTopology", "set queue.name"],
    ),
    "two topologies": (
        CPU,
        {"queue": {"name": "q", "requiredTopology": "rack", "preferredTopology": "rack"}},
        ["queue.requiredTopology and queue.preferredTopology"],
    ),
    "a label of KubeRay": (CPU, {"podLabels": {"app.kubernetes.io/name": "x"}}, ["podLabels.app.kubernetes.io/name"]),
    "a label of Ray": (CPU, {"podLabels": {"ray.io/cluster": "x"}}, ["podLabels.ray.io/cluster"]),
    "an annotation of KubeRay": (
        CPU,
        {"podAnnotations": {"ray.io/overwrite-container-cmd": "true"}},
        ["podAnnotations.ray.io/overwrite-container-cmd"],
    ),
    "EFA of an unknown type": (
        merged(NEEDS_FIGURES, {"workers": {"gpuMemoryGiB": 80}}),
        {"efa": {"required": True}},
        ["efa.required is true", "does not know g9.4xlarge", "workers.efa"],
    ),
    "a label of the chart": (
        CPU,
        {"monitoring": {"labels": {"helm.sh/chart": "x"}}},
        ["monitoring.labels.helm.sh/chart"],
    ),
    "a variable of KubeRay": (CPU, {"env": {"RAY_ADDRESS": "x"}}, ["env.RAY_ADDRESS belongs to KubeRay"]),
    "Redis": (CPU, {"env": {"RAY_REDIS_ADDRESS": "x"}}, ["env.RAY_REDIS_ADDRESS belongs to KubeRay"]),
    "the authentication mode": (CPU, {"env": {"RAY_AUTH_MODE": "disabled"}}, ["auth.mode"]),
    "a secret by its name": (
        CPU,
        {"env": {"WANDB_API_KEY": "0123456789abcdef"}},
        ["env.WANDB_API_KEY", "secretKeyRef"],
    ),
    "a short one": (CPU, {"env": {"HF_TOKEN": "hf_abc"}}, ["env.HF_TOKEN looks like a secret", "secretKeyRef"]),
    "a number as password": (CPU, {"env": {"DB_PASSWORD": 12345678}}, ["env.DB_PASSWORD"]),
    "an AWS key's name": (CPU, {"env": {"AWS_ACCESS_KEY_ID": "x"}}, ["env.AWS_ACCESS_KEY_ID"]),
    "an AWS key": (CPU, {"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, ["env.AWS_SECRET_ACCESS_KEY"]),
    "a password in an address": (
        CPU,
        {"env": {"HTTPS_PROXY": "http://me:hunter2@proxy:3128"}},
        ["env.HTTPS_PROXY holds what looks like a key"],
    ),
    "a secret by its form": (
        CPU,
        {"trainer": {"data": {"version": "hf_" + "a" * 34}}},
        ["trainer.data.version", "looks like a key"],
    ),
    "a secret in a list": (
        CPU,
        {"trainer": {"model": {"freeze": ["a", "AKIA" + "B" * 16]}}},
        ["trainer.model.freeze[1]"],
    ),
}


@pytest.mark.parametrize(("base", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_values_that_cannot_work_are_refused_with_the_key_and_the_figure(base, change, words):
    message = refusal(merged(base, change))
    assert all(word in message for word in words), message


SCHEMA_REFUSED = {
    "a misspelt key": ({"worker": {}}, ["worker"]),
    "a misspelt trainer key": ({"trainer": {"optimm": {}}}, ["trainer", "optimm"]),
    "a wrong type in the trainer": ({"trainer": {"optim": {"lr": "fast"}}}, ["trainer.optim.lr"]),
    "a number that --set made text of": (
        {"trainer": {"optim": {"lr": "1e-5"}}},
        ["trainer.optim.lr", "a number: --set makes text of 1e-5, and --set-json does not"],
    ),
    "the same where null is allowed": ({"trainer": {"optim": {"clip_norm": "1e0"}}}, ["trainer.optim.clip_norm", "--set-json"]),
    "nodes as text": ({"workers": {"nodes": "2"}}, ["workers.nodes"]),
    "no nodes": ({"workers": {"nodes": 0}}, ["workers.nodes"]),
    "half a node": ({"workers": {"nodes": 1.5}}, ["workers.nodes"]),
    "memory without a unit": ({"workers": {"memory": "1024"}}, ["workers.memory"]),
    "memory in a decimal unit": ({"workers": {"memory": "4G"}}, ["workers.memory"]),
    "no CPU": ({"workers": {"cpu": 0}}, ["workers.cpu"]),
    "no deadline": ({"lifecycle": {"activeDeadlineSeconds": 0}}, ["lifecycle.activeDeadlineSeconds"]),
    "no start deadline": ({"lifecycle": {"preRunningDeadlineSeconds": 0}}, ["lifecycle.preRunningDeadlineSeconds"]),
    "negative retries": ({"lifecycle": {"backoffLimit": -1}}, ["lifecycle.backoffLimit"]),
    "negative TTL": ({"lifecycle": {"ttlSecondsAfterFinished": -1}}, ["lifecycle.ttlSecondsAfterFinished"]),
    "a short grace period": (
        {"lifecycle": {"terminationGracePeriodSeconds": 29}},
        ["lifecycle.terminationGracePeriodSeconds"],
    ),
    "suspend": ({"lifecycle": {"suspend": True}}, ["lifecycle", "suspend"]),
    "a section set to null": ({"workers": None}, ["workers"]),
    "a bad digest": ({"image": {"digest": "sha256:abc"}}, ["image.digest"]),
    "two sources of a variable": (
        {"env": {"A": {"valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}, "fieldRef": {"fieldPath": "x"}}}}},
        ["env.A"],
    ),
    "a bad variable name": ({"env": {"A-B": "x"}}, ["A-B"]),
    "a queue that Kueue refuses": ({"queue": {"name": "GPUs"}}, ["queue.name"]),
    "a toleration that Kubernetes refuses": (
        {"head": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
        ["head.tolerations.0"],
    ),
    "a bad label": ({"podLabels": {"team": "not a label"}}, ["podLabels.team"]),
}


@pytest.mark.parametrize(("change", "words"), SCHEMA_REFUSED.values(), ids=SCHEMA_REFUSED)
def test_values_of_the_wrong_shape_are_refused_with_their_path(change, words):
    # Helm writes paths with slashes since 3.18, before that with dots.
    message = refusal(merged(CPU, change)).replace("/", ".")
    assert all(word in message for word in words), message


def test_without_trainer_settings_the_missing_ones_are_named():
    message = refusal({"workers": CPU["workers"]})
    assert "trainer" in message
    assert all(key in message for key in ("name", "model", "data"))


@pytest.mark.parametrize("value", ["hf_short", "risk-assessment-of-large-language-models", "task-abcdefghijklmnopqrstuvwxyz"])
def test_text_that_only_resembles_a_key_is_accepted(value):
    objects = render(merged(CPU, {"trainer": {"data": {"version": value}}}))
    assert run_file(objects)["trainer"]["data"]["version"] == value


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ("g6.13xlarge", "g6.12xlarge"),
        ("p5.48xlarg", "p5.48xlarge"),
        ("p5enn.48xlarge", "p5en.48xlarge"),
        ("g55.48xlarge", "g5.48xlarge"),
        ("p4.24xlarge", "p4d.24xlarge"),
        ("g6-12xlarge.x", "g6.12xlarge"),
    ],
)
def test_an_unknown_type_is_answered_with_the_nearest_known_one(wanted, nearest):
    message = refusal({"trainer": TRAINER, "workers": {"instanceType": wanted}})
    assert f"workers.instanceType is {wanted}, which the chart does not know: write {nearest} if that is meant" in message


def test_an_address_without_a_password_is_accepted():
    address = "http://proxy:3128/a:b@c"
    assert env(render(merged(CPU, {"env": {"HTTPS_PROXY": address}})), "head")["HTTPS_PROXY"] == address


def test_switches_with_secret_looking_names_are_accepted():
    switches = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "TOKENIZERS_PARALLELISM": "false"}
    objects = render(merged(CPU, {"env": switches}))
    for role in ("head", "worker"):
        given = {variable["name"]: variable.get("value") for variable in container(objects, role)["env"]}
        assert switches.items() <= given.items()
