"""values.yaml itself: every key is documented, known to the schema and used; and the chart works inside another."""

import re
import shutil
from typing import Any

import generate_schema
import pytest
import yaml
from chart import CHART, CI_VALUES, CPU, QUEUE, TRAINER, Yaml12Loader, helm_template, merged, refusal, render

SCHEMA = generate_schema.build_schema()
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
# Free maps: what stands in them is the user's.
FREE = {
    "trainer",
    "env",
    "podLabels",
    "podAnnotations",
    "workers.nodeSelector",
    "monitoring.labels",
    "head.nodeSelector",
    "serviceAccount.annotations",
}


def keys(values: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, value in values.items():
        key = f"{path}.{name}".lstrip(".")
        found |= keys(value, key) if isinstance(value, dict) and key not in FREE else {key}
    return found


def schema_keys(schema: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, value in schema["properties"].items():
        key = f"{path}.{name}".lstrip(".")
        found |= schema_keys(value, key) if "properties" in value and key not in FREE else {key}
    return found


def test_every_key_of_values_yaml_is_in_the_schema_and_every_key_of_the_schema_in_values_yaml():
    # For use inside another chart: Helm's own, and the parent's condition.
    assert keys(DEFAULTS) == schema_keys(SCHEMA) - {"global", "enabled"}


def test_every_key_is_documented_right_above_it():
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        leaf = re.match(r"\s*(\w+): \S", line)
        if leaf:
            above = number - 1
            while re.match(r"\s*# (?!--)", lines[above]):
                above -= 1
            assert re.match(r"\s*# -- \S", lines[above]), f"line {number + 1}, {leaf[1]}, has no `# --` comment"


CI = {name: yaml.load((CHART / "ci" / name).read_text(), Yaml12Loader) for name in CI_VALUES}


def at(values: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None  # type: ignore[assignment]
    return values


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    if not rest:
        return {name: value for name, value in values.items() if name != head}
    return {**values, head: without(values[head], rest)}


@pytest.mark.parametrize("key", sorted(keys(DEFAULTS)))
def test_every_value_is_set_by_a_ci_file_and_changes_what_is_rendered(key):
    setting = [values for values in CI.values() if at(values, key) not in (None, at(DEFAULTS, key))]
    assert setting, f"no ci/*-values.yaml sets {key} to something other than its default"
    before, after = helm_template(setting[0]), helm_template(without(setting[0], key))
    assert before.returncode == 0, before.stderr
    assert before.stdout != after.stdout


# Keys that cannot stand beside the others in one file; each is set by another file in ci/.
EXCLUDED = {
    "modelCache.claim": "modelCache.size is of the node's disk",
    "efa.driver": "efa.lockMemory is tried with the device plugin",
    "efa.test": "takes the place of a run",
    "serviceAccount.create": "its name and annotations are those of an account that is made",
    "networkPolicy.enabled": "its namespaces belong to a policy that is made",
    "queue.name": "a queue has no autoscaler",
    "queue.check": "belongs to a queue",
    "queue.priorityClass": "belongs to a queue",
    "queue.requiredTopology": "belongs to a queue",
    "queue.preferredTopology": "belongs to a queue",
}


def test_the_file_that_sets_everything_sets_every_key_that_can_stand_beside_the_others():
    everything = CI["everything-values.yaml"]
    unset = {key for key in keys(DEFAULTS) if at(everything, key) in (None, at(DEFAULTS, key))}
    assert unset == set(EXCLUDED)


@pytest.fixture
def umbrella(tmp_path):
    """Another chart, with ours as a dependency under a condition."""
    shutil.copytree(CHART, tmp_path / "charts/ray-finetune", ignore=shutil.ignore_patterns("tests", "ci"))
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: platform\nversion: 1.0.0\n"
        "dependencies:\n- {name: ray-finetune, version: 0.1.0, condition: ray-finetune.enabled}\n"
    )
    (tmp_path / "values.yaml").write_text("global: {team: research}\n")
    return tmp_path


@pytest.mark.parametrize("values", [CPU, merged(CPU, QUEUE)], ids=["a run", "a run with a queue"])
def test_it_renders_the_same_inside_another_chart(umbrella, values):
    inside = render({"ray-finetune": {**values, "enabled": True}}, chart=umbrella)
    assert inside == render(values)


def test_the_other_charts_condition_switches_it_off(umbrella):
    assert render({"ray-finetune": {"enabled": False}}, chart=umbrella) == {}


def test_a_misspelt_key_is_refused_inside_another_chart(umbrella):
    assert "worker" in refusal({"ray-finetune": {**CPU, "worker": {}}}, chart=umbrella)


@pytest.mark.parametrize("section", ["workers", "image", "lifecycle", "env", "queue", "efa"])
def test_a_section_set_to_null_is_refused_by_its_name(section):
    assert section in refusal(merged(CPU, {section: None}))


@pytest.mark.parametrize("key", ["workers.gpus", "workers.efa", "image.tag", "efa.required", "modelCache.claim", "queue.name"])
def test_a_default_of_null_can_be_written_out(key):
    section, name = key.split(".")
    assert render(merged(CPU, {section: {name: None}})) == render(CPU)


def test_no_template_is_longer_than_one_can_read_at_once():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (CHART / "templates").iterdir()}
    assert max(lengths.values()) <= 120, lengths


def test_no_template_asks_the_cluster_or_chance():
    for path in (CHART / "templates").iterdir():
        assert not re.search(r"\b(lookup|now|randAlphaNum|randAscii|uuidv4|genCA|Capabilities)\b", path.read_text()), path.name


def test_the_trainers_defaults_are_left_to_the_trainer():
    assert DEFAULTS["trainer"] == {}
    assert "sequence_length" not in helm_template({**CPU, "trainer": TRAINER}).stdout
