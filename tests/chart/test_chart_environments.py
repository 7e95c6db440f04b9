"""Every values file that is shipped renders, to objects that the API server takes and settings that the trainer takes."""

import subprocess

import pytest
import yaml
from chart import CHART, CI_VALUES, ENVIRONMENTS, ROOT, Yaml12Loader, helm_template, render, run_file, tool
from kube_schemas import write_schemas

from trainer.config import RunFile

SHIPPED = [ROOT / "environments" / name / "values.yaml" for name in ENVIRONMENTS] + [CHART / "ci" / n for n in CI_VALUES]
shipped = pytest.mark.parametrize("values", SHIPPED, ids=[str(path.relative_to(ROOT)) for path in SHIPPED])


def kubeconform(manifest: str) -> subprocess.CompletedProcess[str]:
    command = [tool("kubeconform"), "-strict", "-summary", "-schema-location", write_schemas(), "-"]
    return subprocess.run(command, input=manifest, capture_output=True, text=True)


@shipped
def test_its_objects_fit_the_schemas_of_kubernetes_and_kuberay(values):
    result = kubeconform(helm_template(values).stdout)
    assert result.returncode == 0, result.stdout
    assert "Skipped: 0" in result.stdout


@pytest.mark.parametrize(("right", "wrong"), [("backoffLimit: 3", "backofLimit: 3"), ("replicas: 0", "replicas: none")])
def test_an_object_that_does_not_fit_is_found(right, wrong):
    manifest = helm_template(SHIPPED[0]).stdout
    assert manifest.count(right) >= 1
    result = kubeconform(manifest.replace(right, wrong))
    assert result.returncode != 0
    assert wrong.split(":")[0] in result.stdout


@shipped
def test_its_manifest_has_no_blanks_at_line_ends(values):
    assert [line for line in helm_template(values).stdout.splitlines() if line != line.rstrip()] == []


RUNS = [values for values in SHIPPED if values.name != "efa-test-values.yaml"]


@pytest.mark.parametrize("values", RUNS, ids=[str(path.relative_to(ROOT)) for path in RUNS])
def test_its_run_file_is_what_the_trainer_reads_and_holds_the_trainer_settings_verbatim(values):
    run = run_file(render(values))
    assert run["trainer"] == yaml.load(values.read_text(), Yaml12Loader)["trainer"]
    RunFile.model_validate(run)


def test_staging_is_eight_gpus_on_two_nodes_with_one_efa_interface_each():
    objects = render(ROOT / "environments/staging/values.yaml")
    hardware = run_file(objects)["hardware"]
    assert hardware == {
        "instance_type": "g6.12xlarge",
        "nodes": 2,
        "workers": 8,
        "min_workers": None,
        "gpus_per_node": 4,
        "gpu_memory_gib": 22,
        "efa_per_node": 1,
        "efa_required": True,
        "cpus_per_worker": 11,
        "autoscaled": True,
        "grace_seconds": 180,
    }


@shipped
def test_helm_3_and_helm_4_render_the_same_bytes(values):
    other = helm_template(values, helm=tool("helm4"))
    assert other.returncode == 0, other.stderr
    assert other.stdout == helm_template(values).stdout
    assert other.stdout


def test_the_two_helms_are_two_major_versions():
    version = {
        name: subprocess.run([tool(name), "version", "--short"], capture_output=True, text=True).stdout
        for name in ("helm", "helm4")
    }
    assert version["helm4"].startswith("v4.")
    if not version["helm"].startswith("v3."):
        pytest.skip("the helm on PATH is itself a Helm 4")
