"""Who reaches Ray's ports can run code: the release's NetworkPolicy and Ray's token keep other pods out."""

import json
from typing import Any

from release import Release, kubectl, wait

IMAGE = "localhost/ray-finetune:0.1.0"
PORTS = (6379, 8265, 8080)
# Prints for each port whether a connection came about, and for the dashboard what it answers without a token.
PROBE = """
import json, socket, sys, urllib.error, urllib.request
host, answers = sys.argv[1], {}
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((host, port), timeout=3).close()
        answers[port] = "open"
    except OSError as error:
        answers[port] = type(error).__name__
if answers[8265] == "open":
    try:
        answers["jobs"] = urllib.request.urlopen(f"http://{host}:8265/api/jobs/", timeout=10).status
    except urllib.error.HTTPError as error:
        answers["jobs"] = error.code
print(json.dumps(answers))
"""


def probe(release: Release, labels: dict[str, str]) -> dict[str, Any]:
    """What a pod with these labels finds on the head's ports."""
    [head] = release.pods("head")
    host = json.loads(kubectl("get", head, "--output", "json"))["status"]["podIP"]
    container = {"name": "probe", "image": IMAGE, "command": ["python", "-c", PROBE, host, *map(str, PORTS)]}
    spec = {"restartPolicy": "Never", "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "labels": labels}, "spec": spec}
    kubectl("create", "-f", "-", input=json.dumps(pod))
    try:
        phase = ("get", "pod", "probe", "--output", "jsonpath={.status.phase}")
        wait("end of the probe", lambda: kubectl(*phase) in ("Succeeded", "Failed"), 60)
        return json.loads(kubectl("logs", "probe"))
    finally:
        kubectl("delete", "pod", "probe", "--force", "--grace-period=0")


def test_only_the_releases_own_pods_reach_rays_ports_and_without_the_policy_the_token_is_asked_for(release):
    running = {"name": "guarded", "duration": {"steps": 500}}
    release.install(trainer=running)
    wait("submitter", lambda: release.pods("submitter") != [])
    own = {"app.kubernetes.io/instance": release.name, "ray-finetune.io/name": release.name}
    assert probe(release, own) == {"6379": "open", "8265": "open", "8080": "open", "jobs": 401}
    assert probe(release, {}) == {"6379": "TimeoutError", "8265": "TimeoutError", "8080": "TimeoutError"}
    release.install(trainer=running, networkPolicy={"enabled": False})
    assert probe(release, {}) == {"6379": "open", "8265": "open", "8080": "open", "jobs": 401}
