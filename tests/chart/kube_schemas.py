"""JSON schemas of the objects the chart renders, as the API server would check them, for kubeconform and hypothesis.

KubeRay's and the Prometheus operator's come from the CRDs in their Go modules, Kubernetes' own from the OpenAPI document
in its: Go's module cache keeps them all, so nothing large is copied into the repository.
"""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / ".tools/schemas"
KUBERAY = "github.com/ray-project/kuberay/ray-operator"
KUBERNETES, KUBERNETES_VERSION = "k8s.io/kubernetes", "v1.36.3"
PROMETHEUS, PROMETHEUS_VERSION = "github.com/prometheus-operator/prometheus-operator", "v0.85.0"
# kind -> its name in Kubernetes' OpenAPI document
BUILTIN = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Pod": "io.k8s.api.core.v1.Pod",
    "ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "Job": "io.k8s.api.batch.v1.Job",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "ResourceClaimTemplate": "io.k8s.api.resource.v1.ResourceClaimTemplate",
}


def kuberay_version() -> str:
    file = ROOT / "tests/tools/kuberay/go.mod"
    match = re.search(rf"{re.escape(KUBERAY)} (v\S+)", file.read_text())
    assert match, f"{file} does not pin {KUBERAY}"
    return match[1]


def module_folder(module: str, version: str) -> Path:
    command = ["go", "mod", "download", "-json", f"{module}@{version}"]
    output = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout
    return Path(json.loads(output)["Dir"])


def strict(node: Any) -> Any:
    """An API server drops or refuses a field it does not know, so an object takes only its own properties."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: strict(schema) for name, schema in value.items()}
        elif key not in ("description", "default", "enum", "required") and not key.startswith("x-kubernetes"):
            result[key] = strict(value)
        elif key in ("enum", "required"):
            result[key] = value
    if node.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    elif "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def crd_schemas(folder: Path, names: str) -> dict[str, Any]:
    """The kinds of a folder's CRDs. The API server adds apiVersion, kind and metadata to what they say."""
    schemas = {}
    for file in sorted(folder.glob(names)):
        crd = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in crd["versions"]:
            if version["name"] == "v1":
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                schemas[crd["names"]["kind"]] = schema
    return schemas


def builtin_schemas(folder: Path) -> dict[str, Any]:
    definitions = json.loads((folder / "api/openapi-spec/swagger.json").read_text())["definitions"]
    quantity = "io.k8s.apimachinery.pkg.api.resource.Quantity"
    definitions[quantity] = {"type": ["string", "number"]}
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["string", "integer"]}
    closed = strict(definitions)
    return {kind: {"$ref": f"#/definitions/{name}", "definitions": closed} for kind, name in BUILTIN.items()}


@cache
def schemas() -> dict[str, Any]:
    """Kind -> schema, with only the definitions that it needs."""
    crds = crd_schemas(module_folder(KUBERAY, kuberay_version()) / "config/crd/bases", "ray.io_rayjobs.yaml")
    prometheus = module_folder(PROMETHEUS, PROMETHEUS_VERSION) / "example/prometheus-operator-crd"
    for names in ("*_podmonitors.yaml", "*_prometheusrules.yaml"):
        crds |= crd_schemas(prometheus, names)
    builtin = builtin_schemas(module_folder(KUBERNETES, KUBERNETES_VERSION))
    return crds | {kind: with_needed_definitions(schema) for kind, schema in builtin.items()}


def with_needed_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    needed: dict[str, Any] = {}
    waiting = [schema["$ref"]]
    while waiting:
        name = waiting.pop().removeprefix("#/definitions/")
        if name not in needed:
            needed[name] = schema["definitions"][name]
            waiting += re.findall(r'"\$ref": "([^"]+)"', json.dumps(needed[name]))
    return {"$ref": schema["$ref"], "definitions": needed}


def write_schemas() -> str:
    """Writes them where kubeconform looks, once for each pair of versions; returns its -schema-location."""
    folder = SCHEMAS / f"kuberay-{kuberay_version()}-kubernetes-{KUBERNETES_VERSION}-prometheus-{PROMETHEUS_VERSION}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for kind, schema in schemas().items():
            (folder / f"{kind.lower()}.json").write_text(json.dumps(schema))
        (folder / "complete").touch()
    return f"{folder}/{{{{ .ResourceKind }}}}.json"


if __name__ == "__main__":
    print(write_schemas())
