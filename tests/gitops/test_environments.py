"""Each environment is what the ApplicationSet needs, and nothing that it deploys is refused by the project or waits on itself."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gitops import ARGOCD, ENVIRONMENTS, ROOT, load
from lint_gitops import MODULES, StackLoader, argocd_version, kubeconform, manifests, policies, policy_problems

CHART = ROOT / "charts/ray-finetune"
NAMES = sorted(path.parent.name for path in ENVIRONMENTS.glob("*/environment.yaml"))
CI_VALUES = sorted(CHART.glob("ci/*-values.yaml"))
VALUES = [ENVIRONMENTS / name / "values.yaml" for name in NAMES] + CI_VALUES
PLATFORM = sorted(ENVIRONMENTS.glob("platform/applications/*.yaml"))


def filled(value: Any, parameters: dict[str, Any]) -> Any:
    """A Go template of field references only, as the ApplicationSet's is; a missing key is an error there, too."""
    if isinstance(value, dict):
        return {key: filled(item, parameters) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, parameters) for item in value]
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> str:
        found: Any = parameters
        for key in match[1].split("."):
            found = found[key]
        return str(found)

    result = re.sub(r"\{\{ \.([\w.]+) \}\}", look_up, value)
    assert "{{" not in result, f"more than a field reference: {value}"
    return result


def application(name: str) -> dict[str, Any]:
    path = {"path": f"environments/{name}", "basename": name}
    return filled(load("applicationset.yaml")["spec"]["template"], {"path": path, **load(f"{name}/environment.yaml")})


def rendered(values: Path) -> list[dict[str, Any]]:
    command = [ROOT / ".tools/bin/helm", "template", "ray-finetune", CHART, "--kube-version", "1.34.0", "-f", values]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [document for document in yaml.safe_load_all(output) if document]


def test_every_folder_with_values_is_an_environment_and_the_generator_finds_it():
    assert sorted(path.parent.name for path in ENVIRONMENTS.glob("*/values.yaml")) == NAMES
    generator = load("applicationset.yaml")["spec"]["generators"][0]["git"]
    found = {path.parent.name for entry in generator["files"] for path in ROOT.glob(entry["path"])}
    assert found == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_gives_the_generator_a_version_and_nothing_else(name):
    settings = load(f"{name}/environment.yaml")
    assert list(settings) == ["chartVersion"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", settings["chartVersion"])


@pytest.mark.parametrize("name", NAMES)
def test_an_environments_application_is_one_that_the_project_allows(name):
    app, project = application(name), load("project.yaml")
    spec = app["spec"]
    assert spec["project"] == project["metadata"]["name"]
    assert spec["destination"]["namespace"] == f"ray-finetune-{name}"
    assert {source["repoURL"] for source in spec["sources"]} == set(project["spec"]["sourceRepos"])
    chart, values = spec["sources"]
    assert chart["chart"] == yaml.safe_load((CHART / "Chart.yaml").read_text())["name"]
    assert chart["targetRevision"] == load(f"{name}/environment.yaml")["chartVersion"]
    (file,) = chart["helm"]["valueFiles"]
    assert (ROOT / file.replace(f"${values['ref']}/", "")).is_file()


def test_a_key_that_the_generator_lacks_is_an_error():
    assert load("applicationset.yaml")["spec"]["goTemplateOptions"] == ["missingkey=error"]
    with pytest.raises(KeyError, match="chartVersion"):
        filled({"targetRevision": "{{ .chartVersion }}"}, {"path": {}})


def test_the_project_allows_the_charts_kinds_and_no_other():
    kinds = {
        (document["apiVersion"].rpartition("/")[0], document["kind"])
        for values in VALUES
        for document in rendered(values)
        # Argo CD does not run a chart's tests.
        if document["metadata"].get("annotations", {}).get("helm.sh/hook") != "test"
    }
    allowed = load("project.yaml")["spec"]["namespaceResourceWhitelist"]
    assert sorted((entry["group"], entry["kind"]) for entry in allowed) == sorted(kinds)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_applied_after_the_rayjob(values):
    for document in rendered(values):
        annotations = document["metadata"].get("annotations", {})
        assert "argocd.argoproj.io/sync-wave" not in annotations
        assert "PruneLast" not in annotations.get("argocd.argoproj.io/sync-options", "")
        assert "post-" not in annotations.get("helm.sh/hook", "")


def test_self_heal_is_on_and_nothing_waits_for_the_run_that_is_replaced():
    policy = load("applicationset.yaml")["spec"]["template"]["spec"]["syncPolicy"]
    assert policy["automated"] == {"prune": True, "selfHeal": True}
    assert {"ServerSideApply=true", "RespectIgnoreDifferences=true"} <= set(policy["syncOptions"])
    assert not any("PruneLast" in option for option in policy["syncOptions"])
    assert load("platform/argocd/argocd-cm.yaml")["data"]["application.resourceTrackingMethod"] == "annotation"


def test_what_argocd_gets_fits_its_crds_and_a_misspelt_key_is_found(tmp_path):
    assert kubeconform(manifests()).returncode == 0
    wrong = tmp_path / "applicationset.yaml"
    wrong.write_text((ENVIRONMENTS / "applicationset.yaml").read_text().replace("selfHeal:", "selfHeel:"))
    result = kubeconform([wrong])
    assert result.returncode != 0
    assert "selfHeel" in result.stdout


@pytest.mark.parametrize("path", PLATFORM, ids=lambda path: path.stem)
def test_a_platform_application_is_pinned_and_the_project_allows_it(path):
    app = yaml.safe_load(path.read_text())
    assert app["metadata"]["name"] == path.stem
    project, _ = yaml.safe_load_all((ENVIRONMENTS / "platform/platform.yaml").read_text())
    source = app["spec"]["source"]
    assert source["repoURL"] in project["spec"]["sourceRepos"]
    if "chart" in source:
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", source["targetRevision"])
        allowed = {entry["namespace"] for entry in project["spec"]["destinations"]}
        assert app["spec"]["destination"]["namespace"] in allowed
    else:
        assert (ROOT / source["path"]).is_dir()


def test_what_is_checked_is_the_version_that_is_installed():
    installed = {path.stem: yaml.safe_load(path.read_text())["spec"]["source"]["targetRevision"] for path in PLATFORM}
    assert installed["karpenter"] == MODULES["github.com/aws/karpenter-provider-aws"][0].removeprefix("v")
    assert installed["kueue"] == MODULES["sigs.k8s.io/kueue"][0].removeprefix("v")
    assert f"ray-operator v{installed['kuberay-operator']}\n" in (ROOT / "tests/tools/kuberay/go.mod").read_text()
    walk = (ENVIRONMENTS / "platform/README.md").read_text()
    assert f"argo-cd/{argocd_version()}/manifests/install.yaml" in walk
    assert f"karpenter-provider-aws/v{installed['karpenter']}/" in walk


def test_no_environment_runs_a_version_that_the_changelog_does_not_know():
    released = set(re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert {load(f"{name}/environment.yaml")["chartVersion"] for name in NAMES} <= released


def test_a_release_that_changes_no_pod_leaves_a_pinned_run_alone_and_another_image_resumes_it(tmp_path):
    new = tmp_path / "ray-finetune"
    shutil.copytree(CHART, new)
    metadata = yaml.safe_load((new / "Chart.yaml").read_text())
    (new / "Chart.yaml").write_text(yaml.safe_dump({**metadata, "version": "99.0.0", "appVersion": "99.0.0"}))

    def release(chart: Path, *arguments: str) -> dict[str, str]:
        values = ENVIRONMENTS / "staging/values.yaml"
        command = [
            ROOT / ".tools/bin/helm",
            "template",
            "ray-finetune",
            chart,
            "--kube-version",
            "1.34.0",
            "-f",
            values,
            *arguments,
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        documents = [document for document in yaml.safe_load_all(output) if document]
        return {document["kind"]: document["metadata"]["name"] for document in documents}

    pinned = ("--set", f"image.digest=sha256:{'0' * 64}")
    assert release(new, *pinned)["RayJob"] == release(CHART, *pinned)["RayJob"]
    assert release(new)["RayJob"] != release(CHART)["RayJob"]
    assert release(new)["ConfigMap"] == release(CHART)["ConfigMap"]


def test_device_plugins_and_workers_tolerate_every_taint_of_the_gpu_pool():
    pool = load("platform/nodes/nodepools.yaml")["spec"]["template"]["spec"]
    taints = {(taint["key"], taint["effect"]) for taint in pool["taints"]}
    (job,) = (document for document in rendered(ENVIRONMENTS / "staging/values.yaml") if document["kind"] == "RayJob")
    worker = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    plugins = [load(f"platform/applications/{name}.yaml") for name in ("nvidia-device-plugin", "aws-efa-k8s-device-plugin")]
    for tolerations in [
        worker["tolerations"],
        *(plugin["spec"]["source"]["helm"]["valuesObject"]["tolerations"] for plugin in plugins),
    ]:
        assert taints <= {(toleration["key"], toleration["effect"]) for toleration in tolerations}


@pytest.mark.parametrize("name", NAMES)
def test_a_node_does_not_expire_and_outlives_the_longest_save(name):
    pool = load("platform/nodes/nodepools.yaml")["spec"]["template"]["spec"]
    minutes = int(pool["terminationGracePeriod"].removesuffix("m"))
    (job,) = (document for document in rendered(ENVIRONMENTS / name / "values.yaml") if document["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
        assert template["spec"]["terminationGracePeriodSeconds"] < minutes * 60
    assert pool["expireAfter"] == "Never"


# Of each of boto3's operations: what IAM asks for it.
ACTIONS = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}


def test_a_runs_role_may_do_what_the_trainer_asks_of_s3_and_no_more():
    source = (ROOT / "trainer/storage.py").read_text()
    operations = set(re.findall(r"\bself\.client\.(\w+)\(", source)) - {"get_paginator"}
    operations |= set(re.findall(r'\b_pages\("(\w+)"', source))
    (document,) = policies(ENVIRONMENTS / "platform/aws/environment.yaml").values()
    listed = [statement["Action"] for statement in document["Statement"]]
    allowed = {action for actions in listed for action in ([actions] if isinstance(actions, str) else actions)}
    assert allowed == {ACTIONS[operation] for operation in operations}


def test_a_policy_that_is_too_wide_is_found():
    wide = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:PutObject", "sqs:*"], "Resource": "*"}]}
    problems = policy_problems(wide)
    assert "s3:PutObject may be used on any resource" in problems
    assert "sqs is a whole service" in problems


def test_irsa_is_trusted_for_the_environments_service_account_alone_and_pod_identity_for_the_cluster():
    stack = yaml.load((ENVIRONMENTS / "platform/aws/environment.yaml").read_text(), StackLoader)
    condition, pod_identity, irsa = stack["Resources"]["Role"]["Properties"]["AssumeRolePolicyDocument"]
    assert condition == stack["Resources"]["PodIdentityAssociation"]["Condition"]
    issuer, account = "oidc.eks.us-west-2.amazonaws.com/id/EXAMPLE", "111122223333"
    filled_in = {"OidcProvider": issuer, "Environment": "staging", "AWS::AccountId": account, "AWS::Partition": "aws"}
    [statement] = json.loads(re.sub(r"\$\{([\w:]+)\}", lambda match: filled_in[match[1]], irsa))["Statement"]
    [user] = [
        each["metadata"]["name"] for each in rendered(ENVIRONMENTS / "staging/values.yaml") if each["kind"] == "ServiceAccount"
    ]
    namespace = application("staging")["spec"]["destination"]["namespace"]
    assert statement == {
        "Effect": "Allow",
        "Principal": {"Federated": f"arn:aws:iam::{account}:oidc-provider/{issuer}"},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {
            "StringEquals": {
                f"{issuer}:aud": "sts.amazonaws.com",
                f"{issuer}:sub": f"system:serviceaccount:{namespace}:{user}",
            }
        },
    }
    [statement] = pod_identity["Statement"]
    assert statement["Condition"]["StringEquals"] == {"aws:SourceAccount": "AWS::AccountId"}
    assert statement["Condition"]["ArnEquals"]["aws:SourceArn"].endswith(":cluster/${ClusterName}")


def test_cfn_lint_finds_a_property_that_does_not_exist(tmp_path):
    wrong = tmp_path / "network.yaml"
    wrong.write_text((ENVIRONMENTS / "platform/aws/network.yaml").read_text().replace("Strategy: cluster", "Strategie: cluster"))
    result = subprocess.run([ROOT / ".venv/bin/cfn-lint", wrong], capture_output=True, text=True)
    assert result.returncode != 0
    assert "Strategie" in result.stdout


BAD = {"conditions": [{"type": "ComparisonError", "message": "no such key"}]}
NOTICES = [
    ("run-complete", {"health": {"status": "Healthy"}}, True),
    ("run-complete", {"health": {"status": "Progressing"}}, False),
    ("run-failed", {"health": {"status": "Degraded"}}, True),
    ("run-failed", {"health": {"status": "Suspended"}}, False),
    ("run-not-synced", BAD, True),
    ("run-not-synced", {"operationState": {"phase": "Failed", "message": "refused"}}, True),
    ("run-not-synced", {"operationState": {"phase": "Succeeded"}}, False),
]


@pytest.fixture
def notifications(tmp_path: Path) -> Callable[..., str]:
    """Runs Argo CD's notifications on an Application with a status. The command wants a kubeconfig, though no cluster."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "none",
            "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none", "namespace": "argocd"}}],
            "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "none", "user": {}}],
        })
    )  # fmt: skip

    def run(status: dict[str, Any], *arguments: str) -> str:
        app = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": {"name": "sft"}, "spec": {}}
        file = tmp_path / "application.yaml"
        file.write_text(yaml.safe_dump({**app, "status": {"sync": {"status": "Synced", "revisions": ["a", "b"]}, **status}}))
        settings = ENVIRONMENTS / "platform/argocd/argocd-notifications-cm.yaml"
        command = [ARGOCD, "admin", "notifications", *arguments, "--config-map", settings, "--secret", ":empty"]
        command = [str(file) if part == "FILE" else part for part in command]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    return run


needs_argocd = pytest.mark.skipif(not ARGOCD.exists(), reason="make test-argocd builds Argo CD")


@needs_argocd
@pytest.mark.parametrize(("trigger", "status", "told"), NOTICES)
def test_who_subscribes_is_told_of_a_runs_end_and_of_nothing_else(notifications, trigger, status, told):
    output = notifications(status, "trigger", "run", trigger, "FILE")
    assert re.findall(r"\b(true|false)$", output, re.M) == [str(told).lower()]


@needs_argocd
@pytest.mark.parametrize(
    ("template", "says"),
    [("run-complete", "sft: the run is complete"), ("run-failed", "sft: the run failed"), ("run-not-synced", "no such key")],
)
def test_a_notice_says_what_happened(notifications, template, says):
    message = yaml.safe_load(notifications(BAD, "template", "notify", template, "FILE", "--recipient", "console:stdout"))["message"]
    assert says in message
