"""The check on a CPU before a queued run asks for GPUs: a hook with its own run file, which Kueue does not see."""

import pytest
from chart import CPU, GPU, QUEUE, container, merged, pod, refusal, render

QUEUED = merged(GPU, QUEUE)
CHANGES = [{}, {"trainer": {"seed": 1}}]
PREFLIGHT = ["ray-finetune", "preflight", "--run", "/etc/ray-finetune/run.json"]


def annotations(obj):
    return obj["metadata"]["annotations"]


def test_a_queued_run_is_checked_before_anything_else_of_the_release_exists():
    objects = render(QUEUED)
    job, run_file = objects["Job"], objects["CheckConfigMap"]
    for hook in (job, run_file):
        assert annotations(hook)["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert annotations(hook)["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    assert int(annotations(run_file)["helm.sh/hook-weight"]) < int(annotations(job)["helm.sh/hook-weight"])
    assert container(objects, "check")["command"] == PREFLIGHT


def test_the_check_reads_the_settings_of_the_run_from_a_file_of_its_own():
    objects = render(QUEUED)
    own, runs = objects["CheckConfigMap"], objects["ConfigMap"]
    assert own["data"] == runs["data"]
    assert own["immutable"] is True
    assert own["metadata"]["name"] not in (runs["metadata"]["name"], objects["RayJob"]["metadata"]["name"])
    volumes = {volume["name"]: volume for volume in pod(objects, "check")["spec"]["volumes"]}
    assert volumes["run"]["configMap"]["name"] == own["metadata"]["name"]


def test_the_next_check_replaces_what_a_failed_one_left():
    names = [
        {kind: render(merged(QUEUED, change))[kind]["metadata"]["name"] for kind in ("Job", "CheckConfigMap")} for change in CHANGES
    ]
    assert names[0] == names[1] == {"Job": "demo-check", "CheckConfigMap": "demo-check"}


def test_the_check_needs_nothing_that_the_release_makes_after_it():
    objects = render(QUEUED)
    made_later = {
        obj["metadata"]["name"] for obj in objects.values() if "helm.sh/hook" not in obj["metadata"].get("annotations", {})
    }
    spec = pod(objects, "check")["spec"]
    assert spec["serviceAccountName"] == "trainer"
    needed = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} | {spec["serviceAccountName"]}
    assert not needed & made_later


def test_the_check_has_the_heads_room_place_and_cache():
    head = {"cpu": "1500m", "memory": "16Gi", "nodeSelector": {"pool": "system"}, "tolerations": [{"operator": "Exists"}]}
    image = {"pullSecrets": ["registry"], "pullPolicy": "Always"}
    values = merged(
        QUEUED, {"head": head, "image": image, "modelCache": {"claim": "models"}, "envFrom": [{"secretRef": {"name": "s"}}]}
    )
    objects = render(values)
    check, head = pod(objects, "check")["spec"], pod(objects, "head")["spec"]
    for key in ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "securityContext", "serviceAccountName"):
        assert check[key] == head[key]
    for key in ("image", "imagePullPolicy", "env", "envFrom", "resources", "securityContext"):
        assert check["containers"][0][key] == head["containers"][0][key]
    cache = [{volume["name"]: volume for volume in spec["volumes"]}["cache"] for spec in (check, head)]
    assert cache[0] == cache[1] == {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}
    assert check["automountServiceAccountToken"] is False


def test_a_refusal_is_not_tried_again_and_a_lost_node_is_not_counted():
    spec = render(QUEUED)["Job"]["spec"]
    refused, lost = spec["podFailurePolicy"]["rules"]
    assert refused == {"action": "FailJob", "onExitCodes": {"containerName": "check", "operator": "In", "values": [2]}}
    assert (lost["action"], lost["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy takes no other
    assert spec["template"]["spec"]["containers"][0]["name"] == "check"
    assert spec["backoffLimit"] <= 3


def test_the_check_ends_by_the_time_in_which_the_cluster_must_have_started():
    objects = render(merged(QUEUED, {"lifecycle": {"preRunningDeadlineSeconds": 1000}}))
    assert objects["Job"]["spec"]["activeDeadlineSeconds"] == 1000 == objects["RayJob"]["spec"]["preRunningDeadlineSeconds"]


def test_kueue_does_not_see_the_check():
    objects = render(merged(QUEUED, {"queue": {"priorityClass": "high", "requiredTopology": "topology.kubernetes.io/zone"}}))
    job = objects["Job"]
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        for key in (*metadata["labels"], *metadata["annotations"]):
            assert "kueue" not in key


@pytest.mark.parametrize(
    "change",
    [{"queue": {"check": False}}, {"queue": {"name": None}}, {"efa": {"test": True}}],
    ids=["switched off", "no queue", "the test of EFA in its place"],
)
def test_there_is_no_check_where_none_is_needed(change):
    objects = render(merged(QUEUED, change))
    assert "CheckConfigMap" not in objects
    assert "check" not in [
        c["name"] for c in objects.get("Job", {}).get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    ]


def test_the_check_does_not_change_which_run_it_is():
    with_check, without = render(QUEUED), render(merged(QUEUED, {"queue": {"check": False}}))
    assert with_check["RayJob"] == without["RayJob"]
    assert with_check["ConfigMap"] == without["ConfigMap"]


@pytest.mark.parametrize("account", [{}, {"create": True, "name": "trainer"}], ids=["by default", "with a name"])
def test_an_account_that_does_not_exist_yet_is_refused_with_both_ways_out(account):
    message = refusal(merged(CPU, {"queue": {"name": "gpus"}, "serviceAccount": account}))
    for words in ("queue.check is true", "serviceAccount.create to false", "serviceAccount.name", "queue.check to false"):
        assert words in message


def test_without_the_check_the_chart_makes_the_account():
    objects = render(merged(CPU, {"queue": {"name": "gpus", "check": False}}))
    assert objects["ServiceAccount"]["metadata"]["name"] == pod(objects, "head")["spec"]["serviceAccountName"] == "demo"
