"""staging and production as they are find room on the nodes that they name: real scheduler, nodes with the catalogue's figures."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import cluster
import pytest
import yaml
from release import RESTRICTED, helm, kubectl, wait

CATALOGUE = yaml.safe_load((cluster.ROOT / "charts/ray-finetune/files/instance-types.yaml").read_text())
ZONES = ("us-east-1a", "us-east-1b")
# An m7i.2xlarge, which has room for the head.
SYSTEM = {"alloc_cpu_m": 7910, "alloc_mem_mib": 29317, "gpu_count": 0, "efa": 0}
# What a usual EKS node's DaemonSets ask for together: CNI, kube-proxy, CSI driver, device plugins, CloudWatch agent, log shipper.
DAEMONS = {"cpu": "600m", "memory": "900Mi"}


@pytest.fixture
def add_node(platform: None) -> Iterator[Callable[[str, dict[str, Any], str], None]]:
    """Adds a node of an instance type, figures and zone, with its DaemonSets. Nothing runs there; all are gone after the test."""
    names: list[str] = []

    def add(instance_type: str, figures: dict[str, Any], zone: str) -> None:
        name = f"fake-{len(names)}"
        names.append(name)
        labels = {"node.kubernetes.io/instance-type": instance_type, "topology.kubernetes.io/zone": zone}
        labels["kubernetes.io/hostname"] = name
        taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if figures["gpu_count"] else []
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}
        kubectl("create", "-f", "-", input=json.dumps(node))
        room = {"cpu": f"{figures['alloc_cpu_m']}m", "memory": f"{figures['alloc_mem_mib']}Mi", "pods": "100"}
        room |= {"nvidia.com/gpu": str(figures["gpu_count"]), "vpc.amazonaws.com/efa": str(figures["efa"])}
        status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
        kubectl("patch", "node", name, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))
        container = {"name": "daemons", "image": cluster.PAUSE, "resources": {"requests": DAEMONS}, "securityContext": RESTRICTED}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": name, "containers": [container]}}
        kubectl("create", "-f", "-", input=json.dumps(pod))

    kubectl("cordon", cluster.NODE)
    yield add
    kubectl("uncordon", cluster.NODE)
    kubectl("delete", "rayclusters", "--all")
    kubectl("delete", "serviceaccounts", "staging", "production", "--ignore-not-found")
    kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    kubectl("delete", "node", *names)


def ray_cluster(environment: str) -> dict[str, Any]:
    """The cluster of an environment's RayJob, with all the workers that its autoscaler may start."""
    values = cluster.ROOT / f"environments/{environment}/values.yaml"
    rendered = yaml.safe_load_all(helm("template", environment, cluster.ROOT / "charts/ray-finetune", "--values", values))
    spec = next(each["spec"]["rayClusterSpec"] for each in rendered if each["kind"] == "RayJob")
    for group in spec["workerGroupSpecs"]:
        group["replicas"] = group["maxReplicas"]
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": environment}, "spec": spec}


def bound(environment: str) -> dict[str, str | None]:
    """The node of each pod of the cluster, None for one that waits."""
    pods = json.loads(kubectl("get", "pods", "--selector", f"ray.io/cluster={environment}", "--output", "json"))["items"]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods}


@pytest.mark.parametrize("environment", ["staging", "production"])
def test_every_pod_finds_room_and_all_workers_are_in_one_zone(environment, add_node):
    cluster_of = ray_cluster(environment)
    [workers] = cluster_of["spec"]["workerGroupSpecs"]
    instance_type = workers["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"]
    add_node("m7i.2xlarge", SYSTEM, ZONES[0])
    for zone in ZONES:  # as many as needed in each, so that one zone alone is a choice
        for _ in range(workers["maxReplicas"]):
            add_node(instance_type, CATALOGUE[instance_type], zone)
    kubectl("create", "serviceaccount", environment)
    kubectl("create", "-f", "-", input=json.dumps(cluster_of))
    count = 1 + workers["maxReplicas"]
    wait(f"{count} bound pods", lambda: len(bound(environment)) == count and all(bound(environment).values()), 60)
    nodes = bound(environment)
    [head] = [node for name, node in nodes.items() if "-head" in name]
    assert head == "fake-0", "the head leaves the workers' nodes to them"
    used = [node for name, node in nodes.items() if "-workers-" in name]
    assert len(set(used)) == len(used), "one worker a node"
    zones = {
        json.loads(kubectl("get", "node", node, "--output", "json"))["metadata"]["labels"]["topology.kubernetes.io/zone"]
        for node in used
    }
    assert len(zones) == 1
