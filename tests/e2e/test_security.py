"""Who reaches a run's ports, and what its pods may do. The namespace itself refuses pods that are not Pod Security's "restricted"."""

import json
from collections.abc import Iterator
from typing import Any

import cluster
import pytest
import yaml
from release import RESTRICTED, Release, helm, kubectl, ready, settings, wait

pytestmark = pytest.mark.full

LISTENING = """
import json
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:]]
loopback = ("0100007F", "00000000000000000000000001000000")
print(json.dumps(sorted({int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].split(":")[0] not in loopback})))
"""
# Prints which of the ports accept a connection; the first one is waited for as long as it says.
CONNECT = """
import json, socket, sys, time
host, seconds, *ports = sys.argv[1:]
def accepts(port):
    try:
        socket.create_connection((host, int(port)), 2).close()
    except OSError:
        return False
    return True
deadline = time.monotonic() + float(seconds)
while not accepts(ports[0]) and time.monotonic() < deadline:
    time.sleep(0.5)
print(json.dumps([int(port) for port in ports if accepts(port)]))
"""
# Prints what the dashboard answers to a job, and Ray's control plane to a read.
WITHOUT_TOKEN = """
import json, sys, urllib.error, urllib.request
host = sys.argv[1]
job = urllib.request.Request(f"http://{host}:8265/api/jobs/", json.dumps({"entrypoint": "true"}).encode())
job.add_header("Content-Type", "application/json")
try:
    said = urllib.request.urlopen(job, timeout=10).status
except urllib.error.HTTPError as error:
    said = error.code
from ray._raylet import GcsClient
try:
    GcsClient(address=f"{host}:6379").internal_kv_keys(b"", None)
    control = "answered"
except Exception as error:
    control = str(error)
print(json.dumps([said, control]))
"""
ENDLESS = settings("running", duration={"steps": 100_000})


@pytest.fixture(scope="module")
def running(platform: None) -> Iterator[Release]:
    """A release whose run is under way."""
    release = Release("running")
    release.install(trainer=ENDLESS)
    wait("worker pods", lambda: len(ready(release.selector("worker"))) == 2)
    yield release
    release.uninstall()


def python(pod: str, container: str, program: str) -> Any:
    """The JSON that a program prints in a container of a run."""
    return json.loads(kubectl("exec", pod, "--container", container, "--", "python", "-c", program).splitlines()[-1])


def visitor(name: str, labels: dict[str, str], program: str, *arguments: Any) -> Any:
    """The JSON that a program prints in a pod of its own with these labels."""
    image = f"localhost/ray-finetune:{yaml.safe_load((cluster.ROOT / 'charts/ray-finetune/Chart.yaml').read_text())['appVersion']}"
    command = ["python", "-c", program, *map(str, arguments)]
    container = {"name": "visitor", "image": image, "command": command, "securityContext": RESTRICTED}
    metadata = {"name": name, "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], "restartPolicy": "Never"}}
    kubectl("create", "-f", "-", input=json.dumps(pod))
    try:
        wait(
            f"end of {name}", lambda: kubectl("get", "pod", name, "--output", "jsonpath={.status.phase}") in ("Succeeded", "Failed")
        )
        return json.loads(kubectl("logs", name).splitlines()[-1])
    finally:
        kubectl("delete", "pod", name, "--grace-period=1")


def address(pod: str) -> str:
    return kubectl("get", pod, "--output", "jsonpath={.status.podIP}")


def test_all_processes_run_as_an_ordinary_user_without_any_capability(running):
    program = "import json; print(json.dumps(open('/proc/1/status').read()))"
    for component, containers in {"head": ["ray-head", "autoscaler"], "worker": ["ray-worker"]}.items():
        for pod in running.pods(component):
            for container in containers:
                status = dict(line.split(":\t", 1) for line in python(pod, container, program).splitlines())
                assert status["Uid"].split() == ["1000"] * 4
                assert {name: int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == dict.fromkeys(
                    ("CapEff", "CapPrm", "CapBnd", "CapAmb"), 0
                )
                assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"


def test_another_pod_reaches_no_port_of_the_head_or_a_worker_and_the_releases_own_reaches_all(running):
    own = next(each for each in running.objects if each["kind"] == "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    for component in ("head", "worker"):
        pod = running.pods(component)[0]
        listening = python(pod, f"ray-{component}", LISTENING)
        assert component == "worker" or {6379, 8265} <= set(listening)
        assert visitor("own", own, CONNECT, address(pod), 60, *listening) == listening
        assert visitor("stranger", {}, CONNECT, address(pod), 10, *listening) == []


def test_without_the_policy_it_reaches_them_and_is_refused_for_want_of_the_token(running):
    head = running.pods("head")[0]
    running.install(trainer=ENDLESS, networkPolicy={"enabled": False})
    assert running.pods("head") == [head], "the policy is no part of the run"
    assert visitor("stranger", {}, CONNECT, address(head), 60, 6379, 8265) == [6379, 8265]
    said, control = visitor("tokenless", {}, WITHOUT_TOKEN, address(head))
    assert said in (401, 403)
    assert "authentication" in control.lower()


@pytest.mark.parametrize("locks", [False, True])
def test_workers_are_restricted_but_where_they_lock_memory(platform, locks):
    values = cluster.ROOT / "environments/staging/values.yaml"
    setting = f"efa.lockMemory={str(locks).lower()}"
    rendered = helm("template", "shape", cluster.ROOT / "charts/ray-finetune", "--values", values, "--set", setting)
    job = next(each for each in yaml.safe_load_all(rendered) if each["kind"] == "RayJob")
    template = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    template["spec"]["serviceAccountName"] = "default"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "shape"}, "spec": template["spec"]}
    create = ("create", "--dry-run=server", "-f", "-")
    if locks:
        with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
            kubectl(*create, input=json.dumps(pod))
    else:
        kubectl(*create, input=json.dumps(pod))
