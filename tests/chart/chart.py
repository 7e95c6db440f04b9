"""What the chart's tests share: `render` runs the real helm and returns parsed objects, `refusal` its complaint."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ray-finetune"
ENVIRONMENTS = sorted(path.parent.name for path in ROOT.glob("environments/*/values.yaml"))
CI_VALUES = sorted(path.name for path in CHART.glob("ci/*-values.yaml"))

# The least that renders: a trainer that says what it trains, on two small CPU nodes.
TRAINER = {
    "name": "demo",
    "model": {"path": "Qwen/Qwen2.5-1.5B"},
    "data": {"train": "s3://bucket/train.jsonl"},
    "storage": {"uri": "s3://bucket/runs"},
}
CPU = {"trainer": TRAINER, "workers": {"nodes": 2, "cpu": 2, "memory": "4Gi"}}
GPU = {"trainer": TRAINER, "workers": {"instanceType": "g6.12xlarge", "nodes": 2}}
QUEUE = {"queue": {"name": "gpus"}, "serviceAccount": {"create": False, "name": "trainer"}}

Objects = dict[str, dict[str, Any]]
ANSWERS: dict[str, subprocess.CompletedProcess[str]] = {}


class Yaml12Loader(yaml.CSafeLoader):
    """PyYAML's loader, which also takes 1e-05 for a number, as Kubernetes does."""


Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def tool(name: str) -> str:
    own = ROOT / ".tools/bin" / name
    path = str(own) if own.exists() else shutil.which(name)
    assert path, f"{name} is neither in .tools/bin nor on PATH; run make tools"
    return path


def merged(base: dict[str, Any], *overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for override in overrides:
        for key, value in override.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def helm_template(values: dict[str, Any] | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `helm template`; the same question is asked once."""
    key = json.dumps([str(values) if isinstance(values, Path) else values, options], default=str)
    if key not in ANSWERS:
        ANSWERS[key] = run_helm_template(values, **options)
    return ANSWERS[key]


def run_helm_template(
    values: dict[str, Any] | Path,
    release: str = "demo",
    namespace: str = "training",
    chart: Path = CHART,
    helm: str | None = None,
    arguments: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    # A helm built by `go install` takes the cluster for Kubernetes 1.20; a released one does not.
    command = [
        helm or tool("helm"),
        "template",
        release,
        str(chart),
        "-n",
        namespace,
        "--kube-version",
        "1.34.0",
        *arguments,
    ]
    if isinstance(values, Path):
        return subprocess.run([*command, "-f", str(values)], capture_output=True, text=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(yaml_text(values))
        file.flush()
        return subprocess.run([*command, "-f", file.name], capture_output=True, text=True)


def yaml_text(values: dict[str, Any]) -> str:
    """JSON that is also YAML: no surrogate pairs, and nothing raw that YAML does not allow."""
    text = json.dumps(values, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def parse(manifest: str) -> Objects:
    """Objects by kind, but the dashboard's ConfigMap as Dashboard and the check's as CheckConfigMap; two of one kind would be a surprise."""
    objects: Objects = {}
    for document in yaml.load_all(manifest, Loader=Yaml12Loader):
        if document:
            kind = document["kind"]
            if "ray-finetune.json" in document.get("data", {}):
                kind = "Dashboard"
            elif kind == "ConfigMap" and "helm.sh/hook" in document["metadata"].get("annotations", {}):
                kind = "CheckConfigMap"
            assert kind not in objects, f"two objects of kind {kind}"
            objects[kind] = document
    return objects


def render(values: dict[str, Any] | Path, **options: Any) -> Objects:
    result = helm_template(values, **options)
    assert result.returncode == 0, result.stderr
    return parse(result.stdout)


def refusal(values: dict[str, Any] | Path, **options: Any) -> str:
    """Why helm refuses these values: the message without helm's frame around it."""
    result = helm_template(values, **options)
    assert result.returncode != 0, "these values were accepted"
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return "\n".join(line for line in lines if not line.startswith("Use --debug"))


def run_file(objects: Objects) -> dict[str, Any]:
    return json.loads(objects["ConfigMap"]["data"]["run.json"])


def pod(objects: Objects, role: str) -> dict[str, Any]:
    if role in ("check", "test"):
        return objects["Job"]["spec"]["template"] if role == "check" else objects["Pod"]
    spec = objects["RayJob"]["spec"]
    if role == "submitter":
        return spec["submitterPodTemplate"]
    cluster = spec["rayClusterSpec"]
    return (cluster["headGroupSpec"] if role == "head" else cluster["workerGroupSpecs"][0])["template"]


def container(objects: Objects, role: str) -> dict[str, Any]:
    return pod(objects, role)["spec"]["containers"][0]


def env(objects: Objects, role: str) -> dict[str, Any]:
    """Environment by name; a name that comes twice is an error."""
    entries = container(objects, role)["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names)), f"a variable comes twice: {names}"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def run_name(values: dict[str, Any], **options: Any) -> str:
    return render(values, **options)["RayJob"]["metadata"]["name"]


def only_in_long_runs(examples: int) -> int:
    """Hypothesis examples: few by default, EXAMPLES of them in a long run."""
    return int(os.environ.get("EXAMPLES", examples))
