"""What the chart takes from elsewhere is what it is there: catalogue, schema, Ray's version."""

import json
import re

import generate_catalogue
import generate_schema
import pytest
import yaml
from chart import CHART, ROOT, TRAINER, render, run_file

CATALOGUE = generate_catalogue.catalogue()


def test_the_catalogue_is_what_the_csv_gives():
    assert generate_catalogue.CATALOGUE.read_text() == generate_catalogue.render()
    assert yaml.safe_load(generate_catalogue.CATALOGUE.read_text()) == CATALOGUE
    assert len(CATALOGUE) == 46


def test_the_schema_is_what_the_trainer_declares():
    assert json.loads(generate_schema.SCHEMA.read_text()) == generate_schema.build_schema()


def test_the_schema_refers_to_nothing_outside_itself():
    references = re.findall(r'"\$ref": "([^"]+)"', generate_schema.SCHEMA.read_text())
    assert references
    assert all(reference.startswith("#/definitions/") for reference in references)


def test_the_ray_version_is_the_locked_one():
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["annotations"]["ray-finetune.io/ray-version"] == locked[1]


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_instance_type_alone_gives_a_pod_that_fits_its_node(name):
    row = CATALOGUE[name]
    objects = render({"trainer": TRAINER, "workers": {"instanceType": name, "nodes": 2}})
    worker = objects["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    container = worker["template"]["spec"]["containers"][0]
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"]
    assert int(limits["nvidia.com/gpu"]) == row["gpu_count"] == int(worker["rayStartParams"]["num-gpus"])
    assert int(limits.get("vpc.amazonaws.com/efa", 0)) == row["efa"]
    assert row["alloc_cpu_m"] - 2000 <= int(limits["cpu"]) * 1000 <= row["alloc_cpu_m"] - 1000
    memory = mebibytes(limits["memory"])
    assert 0.75 * row["alloc_mem_mib"] <= memory <= row["alloc_mem_mib"] - 2048 - (10256 if row["efa"] else 0)
    hardware = run_file(objects)["hardware"]
    assert hardware["workers"] == 2 * row["gpu_count"]
    assert hardware["gpu_memory_gib"] == row["gpu_mem_gib"]
    assert 1 <= hardware["cpus_per_worker"] * row["gpu_count"] <= int(worker["rayStartParams"]["num-cpus"])


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024, "Ti": 1024 * 1024}[quantity[-2:]]
