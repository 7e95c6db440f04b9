"""The pods of a run: what Pod Security's `restricted` asks of them, and where EFA, GPUs and tokens may be."""

import pytest
from chart import CPU, GPU, QUEUE, container, env, merged, pod, render

CASES = {
    "CPU": CPU,
    "GPU": GPU,
    "queue": merged(GPU, QUEUE),
    "training image as submitter": merged(GPU, {"submitter": {"image": None}}),
    "DRA": merged(GPU, {"efa": {"driver": "dra"}, "workers": {"shm": "1Gi", "hugepages2Mi": "5120Mi"}}),
    "cache claim": merged(GPU, {"modelCache": {"claim": "models"}}),
}
cases = pytest.mark.parametrize("values", CASES.values(), ids=CASES)
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "csi", "ephemeral", "downwardAPI"}


def violations(spec, containers):
    """What of https://kubernetes.io/docs/concepts/security/pod-security-standards `restricted` a pod breaks."""
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"volume {volume}"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    whole = spec.get("securityContext", {})
    for one in containers:
        own = one.get("securityContext", {})
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield "privilege escalation"
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"capabilities {capabilities}"
        if not own.get("runAsNonRoot", whole.get("runAsNonRoot")) or own.get("runAsUser", whole.get("runAsUser")) == 0:
            yield "root"
        if own.get("seccompProfile", whole.get("seccompProfile", {})).get("type") != "RuntimeDefault":
            yield "seccomp"


def roles(objects):
    """Every pod of a release; a check stands before a queued run only."""
    return ["head", "worker", "submitter", "test", *(["check"] if "Job" in objects else [])]


@cases
@pytest.mark.parametrize("role", ["head", "worker", "submitter", "test", "check"])
def test_every_pod_meets_pod_security_restricted(values, role):
    objects = render(values)
    if role not in roles(objects):
        assert "queue" not in values
        return
    spec = pod(objects, role)["spec"]
    containers = list(spec["containers"])
    if role == "head":
        # The operator adds the autoscaler to the head, with this security context.
        cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
        containers += [cluster["autoscalerOptions"]] if "autoscalerOptions" in cluster else []
    assert list(violations(spec, containers)) == []


def test_workers_that_lock_memory_are_the_only_exception():
    objects = render(merged(GPU, {"efa": {"lockMemory": True}}))
    found = {
        role: list(violations(pod(objects, role)["spec"], [container(objects, role)])) for role in ("head", "worker", "submitter")
    }
    assert found == {
        "head": [],
        "worker": ["capabilities {'drop': ['ALL'], 'add': ['IPC_LOCK']}", "root"],
        "submitter": [],
    }


@cases
def test_only_workers_ask_for_gpus_efa_and_huge_pages(values):
    objects = render(values)
    for role in set(roles(objects)) - {"worker"}:
        resources = container(objects, role)["resources"]
        assert set(resources["limits"]) == set(resources["requests"]) == {"cpu", "memory"}
        assert "claims" not in resources
        assert "resourceClaims" not in pod(objects, role)["spec"]


@cases
def test_every_mount_has_its_volume_and_every_volume_its_mount(values):
    objects = render(values)
    for role in roles(objects):
        mounts = container(objects, role)["volumeMounts"]
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod(objects, role)["spec"]["volumes"]}


@cases
def test_variables_come_once_and_the_same_on_head_and_workers_but_for_the_hidden_driver(values):
    objects = render(values)
    head, worker = env(objects, "head"), env(objects, "worker")
    for role in set(roles(objects)) & {"test", "check"}:
        assert env(objects, role) == head
    assert head.pop("NVIDIA_VISIBLE_DEVICES") == "void"
    assert head == worker


@cases
def test_no_container_has_a_command_that_keeps_kuberay_from_starting_ray(values):
    objects = render(values)
    for role in ("head", "worker"):
        assert not {"command", "args"} & set(container(objects, role))
    save = {"preStop": {"exec": {"command": ["ray-finetune", "stop", "--wait"]}}}
    assert [container(objects, role).get("lifecycle") for role in ("head", "worker")] == [save, None]


def test_a_secret_is_named_and_never_copied():
    reference = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    objects = render(merged(CPU, {"env": {"HF_TOKEN": {"valueFrom": reference}}}))
    assert env(objects, "head")["HF_TOKEN"] == env(objects, "worker")["HF_TOKEN"] == reference
