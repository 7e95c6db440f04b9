"""GPU nodes start last: Ray's own autoscaler, given the rendered cluster, starts them when the driver asks, and not before.

Ray's planner runs as it is, without Kubernetes: cluster spec and requests in, nodes to launch out.
"""

import pytest
from chart import CPU, GPU, TRAINER, merged, render, run_file
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest  # pyright: ignore[reportAttributeAccessIssue]

CASES = {
    "two CPU nodes": CPU,
    "g6.12xlarge": GPU,
    "p5en.48xlarge": merged(GPU, {"workers": {"instanceType": "p5en.48xlarge", "nodes": 4}}),
    "half of the GPUs": merged(GPU, {"workers": {"gpus": 2, "cpu": 7}}),
    "one GPU a node": {"trainer": TRAINER, "workers": {"instanceType": "g6.xlarge", "nodes": 3}},
    "less than a CPU": merged(CPU, {"workers": {"cpu": "500m"}}),
}


def nodes_started(objects, bundles):
    cluster = {"metadata": {"name": "demo", "namespace": "training"}, "spec": objects["RayJob"]["spec"]["rayClusterSpec"]}
    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster), skip_content_hash=True)
    gangs = [GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in bundles])] if bundles else []
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        gang_resource_requests=gangs,
    )
    reply = ResourceDemandScheduler().schedule(request)
    assert not reply.infeasible_gang_resource_requests
    return {launch.instance_type: launch.count for launch in reply.to_launch if launch.instance_type != "headgroup"}


def bundles_of(hardware):
    """What Ray Train asks for: a bundle of CPUs, and one GPU, for each worker process."""
    gpu = {"GPU": 1} if hardware["gpus_per_node"] else {}
    return [{"CPU": hardware["cpus_per_worker"], **gpu}] * hardware["workers"]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_all_nodes_start_when_the_driver_asks_for_its_workers_and_none_before(values):
    objects = render(values)
    hardware = run_file(objects)["hardware"]
    assert nodes_started(objects, []) == {}
    assert nodes_started(objects, bundles_of(hardware)) == {"workers": hardware["nodes"]}
