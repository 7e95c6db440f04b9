"""For any values: what the schema takes renders to valid objects with every value as it was written, or is refused by name.

EXAMPLES=2000 pytest tests/chart/test_chart_properties.py runs thousands; by default a few run with every test.
"""

import copy
import json
import re
from typing import Any

import generate_schema
import jsonschema
import pytest
from chart import CPU, GPU, container, env, merged, only_in_long_runs, parse, pod, run_file, run_helm_template
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from kube_schemas import schemas
from schema_values import ValuesFrom

SCHEMA = generate_schema.build_schema()
VALUES = ValuesFrom(SCHEMA)
# Shrinking would take minutes of helm; a failing example is small enough to read as it is.
long_run = settings(
    max_examples=only_in_long_runs(12),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
# What another section must agree with is drawn less freely, so that most values files can work.
TOGETHER = ("workers", "efa", "queue", "trainer", "global", "enabled")


@st.composite
def values_files(draw: st.DrawFn) -> dict[str, Any]:
    base = draw(st.sampled_from([CPU, GPU]))
    names = draw(
        st.lists(st.sampled_from([name for name in SCHEMA["properties"] if name not in TOGETHER]), unique=True, max_size=5)
    )
    values = {name: draw(VALUES.of(SCHEMA["properties"][name])) for name in names}
    trainer = SCHEMA["definitions"]["TrainerConfig"]["properties"]
    changed = draw(st.lists(st.sampled_from([name for name in trainer if name != "storage"]), unique=True, max_size=4))
    values["trainer"] = {name: draw(VALUES.of(trainer[name])) for name in changed}
    # The merge with the base would mend what a section leaves out.
    values["trainer"] = {**base["trainer"], **values["trainer"]}
    if draw(st.booleans()):
        values["workers"] = {**base["workers"], "nodes": draw(st.integers(1, 1000))}
        values["efa"] = draw(VALUES.of(SCHEMA["properties"]["efa"]))
    if draw(st.booleans()):
        values["queue"] = draw(VALUES.of(SCHEMA["properties"]["queue"]))
        if values["queue"]["check"]:
            # What the check needs; one in two would be refused without.
            values["serviceAccount"] = {"create": False, "annotations": {}, **draw(st.sampled_from([{}, {"name": "trainer"}]))}
    return {**base, **values}


def rendered(values: dict[str, Any]):
    """Objects, or None where the chart refuses by a sentence that begins with a key; a broken template fails."""
    result = run_helm_template(values)
    if result.returncode == 0:
        return parse(result.stdout)
    sentence = re.search(
        r"(?:error calling fail: |: )?((?:[a-zA-Z]+\.)[\w./\[\]-]+) (is|would|belongs|looks|holds|must|and)\b",
        result.stderr,
    )
    if "schema" in result.stderr and "control characters are not allowed" in result.stderr:
        return None  # Helm before 3.18 takes no such character, wherever it stands
    assert "schema" not in result.stderr, result.stderr
    assert sentence, result.stderr
    return None


@long_run
@given(values_files())
def test_any_values_of_the_schema_render_to_valid_objects_with_every_value_unchanged(values):
    objects = rendered(values)
    assume(objects is not None)
    assert objects
    for obj in objects.values():
        jsonschema.Draft7Validator(schemas()[obj["kind"]]).validate(obj)
    if "RayJob" not in objects:
        assert set(objects) <= {"Job", "ResourceClaimTemplate"}  # the test of EFA, in place of a run
        return
    assert_same_json(objects["ConfigMap"]["data"]["run.json"], values["trainer"])
    for role in ("head", "worker"):
        assert_text_arrived(values.get("env", {}), env(objects, role))
    for role in ("head", "worker", "submitter"):
        metadata = pod(objects, role)["metadata"]
        assert_text_arrived(values.get("podLabels", {}), metadata["labels"])
        assert_text_arrived(values.get("podAnnotations", {}), metadata["annotations"])
    assert_lifecycle_arrived(values.get("lifecycle", {}), objects)


def assert_same_json(run_json: str, trainer: dict[str, Any]):
    """A float without a fraction may come as an integer; JSON has but one kind of number."""
    assert json.loads(run_json, parse_int=float)["trainer"] == json.loads(json.dumps(trainer), parse_int=float)


def assert_text_arrived(wanted: dict[str, Any], found: dict[str, Any]):
    for name, value in wanted.items():
        if value is None:
            assert name not in found
        elif isinstance(value, dict):
            assert found[name] == value["valueFrom"]
        elif isinstance(value, str):
            assert found[name] == value
        else:
            assert isinstance(found[name], str)
            assert json.loads(found[name], parse_int=float) == value


def assert_lifecycle_arrived(wanted: dict[str, Any], objects: Any):
    spec = objects["RayJob"]["spec"]
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"):
        if key in wanted:
            assert spec[key] == wanted[key]
    if "terminationGracePeriodSeconds" in wanted:
        assert pod(objects, "worker")["spec"]["terminationGracePeriodSeconds"] == wanted["terminationGracePeriodSeconds"]
        assert container(objects, "head")["env"]


def places(schema: dict[str, Any], path: tuple[str, ...] = ()):
    """Every key of values.yaml with the schema of its value."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for option in schema.get("anyOf", []):
        yield from places(option, path)
    for name, value in schema.get("properties", {}).items():
        yield (*path, name), value
        yield from places(value, (*path, name))


PLACES = [place for place in places(SCHEMA) if place[0][0] not in ("global",)]


def takes(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft7Validator({**schema, "definitions": SCHEMA["definitions"]}).is_valid(value)


@long_run
@given(st.sampled_from(PLACES), st.sampled_from([{"a": 1}, [1, "x"], "~~ no ~~", -7.25, True, 1e300]))
def test_any_value_of_the_wrong_shape_is_refused_with_its_key(place, wrong):
    path, schema = place
    assume(not takes(schema, wrong))
    values = copy.deepcopy(GPU)
    section: Any = values
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = wrong
    result = run_helm_template(values)
    assert result.returncode != 0
    assert path[-1] in result.stderr


@long_run
@given(st.sampled_from(sorted({path[:-1] for path, _ in PLACES})), st.from_regex(r"\A[a-z]{3,12}X\Z"))
def test_any_unknown_key_is_refused_by_its_name(path, unknown):
    values = merged(GPU, {})
    values = copy.deepcopy(values)
    section: Any = values
    for name in path:
        section = section.setdefault(name, {})
    section[unknown] = 1
    result = run_helm_template(values)
    assert result.returncode != 0
    assert unknown in result.stderr
    assert ".".join(path) in result.stderr.replace("/", ".")


@pytest.mark.parametrize(
    "value", [0, False, "", 1_000_000, 1e-5, "0123", "true", "two\nlines", "ü😀", "\x7f\u2028\ufeff", "a: b # c"]
)
def test_awkward_values_arrive_unchanged(value):
    number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
    trainer = {"optim": {"weight_decay": value}} if number else {"data": {"version": str(value)}}
    objects = rendered(merged(CPU, {"trainer": trainer, "env": {"VALUE": value}, "podAnnotations": {"note": value}}))
    if objects is None:
        pytest.skip("this helm takes no control characters")
    assert run_file(objects)["trainer"] == merged(CPU["trainer"], trainer)
    assert_text_arrived({"VALUE": value}, env(objects, "worker"))
    assert_text_arrived({"note": value}, pod(objects, "head")["metadata"]["annotations"])
