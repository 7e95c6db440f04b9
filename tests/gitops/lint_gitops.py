"""Checks what environments/ gives to Argo CD and to AWS: objects by their CRDs' schemas, stacks by cfn-lint, policies by cloudsplaining.

    python tests/gitops/lint_gitops.py

The CRDs come from Go modules: Argo CD's, Karpenter's and Kueue's own.
"""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from cloudsplaining.scan.policy_document import PolicyDocument

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/chart"))
from kube_schemas import strict  # noqa: E402

ENVIRONMENTS = ROOT / "environments"
STACKS = sorted(ENVIRONMENTS.glob("platform/aws/*.yaml"))
SCHEMAS = ROOT / ".tools/schemas"
# module -> (version, folder of its CRDs). An Application of the platform installs the same version.
MODULES = {
    "github.com/aws/karpenter-provider-aws": ("v1.14.1", "pkg/apis/crds"),
    "sigs.k8s.io/kueue": ("v0.17.0", "config/components/crd/bases"),
}
ARGOCD = "github.com/argoproj/argo-cd/v3"
CONFIG_MAP = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in ("apiVersion", "kind")},
        "metadata": {"type": "object"},
        "data": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}


def manifests() -> list[Path]:
    """Files of Kubernetes objects: not values, not what the generator reads, not stacks."""
    return sorted(
        path for path in ENVIRONMENTS.rglob("*.yaml") if path.name not in ("values.yaml", "environment.yaml") and path not in STACKS
    )


def argocd_version() -> str:
    match = re.search(rf"^\s*{ARGOCD} (v\S+)", (ROOT / "tests/tools/argocd/go.mod").read_text(), re.M)
    assert match, f"tests/tools/argocd/go.mod does not pin {ARGOCD}"
    return match[1]


def download(module: str, version: str) -> dict[str, str]:
    # Where Go is older than a module asks for, it says so and exits 1; the module is there all the same.
    command = ["go", "mod", "download", "-json", f"{module}@{version}"]
    return json.loads(subprocess.run(command, cwd="/", capture_output=True, text=True).stdout)


def crds() -> Iterator[dict[str, Any]]:
    for module, (version, folder) in MODULES.items():
        for file in sorted((Path(download(module, version)["Dir"]) / folder).glob("*.yaml")):
            yield yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    yield from argocd_crds()


def argocd_crds() -> Iterator[dict[str, Any]]:
    for name in ("application", "applicationset", "appproject"):
        yield yaml.load(argocd_file(f"manifests/crds/{name}-crd.yaml"), Loader=yaml.CSafeLoader)


def argocd_file(path: str) -> bytes:
    """A file of Argo CD's module, out of its archive: Go unpacks it only where it is new enough to build it."""
    version = argocd_version()
    with zipfile.ZipFile(download(ARGOCD, version)["Zip"]) as archive:
        return archive.read(f"{ARGOCD}@{version}/{path}")


@cache
def schema_location() -> str:
    """Writes the schemas where kubeconform looks, once for each set of versions."""
    versions = [version for version, _ in MODULES.values()]
    folder = SCHEMAS / "-".join(["gitops", argocd_version(), *versions])
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # kubeconform takes the version for the group where there is none.
        (folder / "configmap-v1-v1.json").write_text(json.dumps(CONFIG_MAP))
        for crd in crds():
            for version in crd["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                name = f"{crd['spec']['names']['kind']}-{crd['spec']['group']}-{version['name']}.json".lower()
                (folder / name).write_text(json.dumps(schema))
        (folder / "complete").touch()
    return f"{folder}/{{{{ .ResourceKind }}}}-{{{{ .Group }}}}-{{{{ .ResourceAPIVersion }}}}.json"


def kubeconform(paths: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [ROOT / ".tools/bin/kubeconform", "-strict", "-summary", "-schema-location", schema_location(), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True)


class StackLoader(yaml.SafeLoader):
    """Reads CloudFormation's short forms: a reference stays as its text, which is no wildcard."""


def short_form(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.ScalarNode)
    return loader.construct_scalar(node)


StackLoader.add_multi_constructor("!", short_form)


def policies(stack: Path) -> dict[str, dict[str, Any]]:
    """Identity policies of a stack's roles, by role and name. A resource's own policy names its principals, and is cfn-lint's."""
    resources = yaml.load(stack.read_text(), StackLoader)["Resources"]
    return {
        f"{name} {policy['PolicyName']}": policy["PolicyDocument"]
        for name, resource in resources.items()
        if resource["Type"] == "AWS::IAM::Role"
        for policy in resource["Properties"].get("Policies", [])
    }


def policy_problems(document: dict[str, Any]) -> list[str]:
    policy = PolicyDocument(document)
    found = {
        "may be used on any resource": policy.all_allowed_unrestricted_actions,
        "is a whole service": policy.service_wildcard,
        "lets its holder gain more rights": [str(one) for one in policy.allows_privilege_escalation],
        "allows all but what it names": policy.contains_statement_using_not_action,
    }
    return [f"{action} {problem}" for problem, actions in found.items() for action in actions]


def main() -> int:
    checked = kubeconform(manifests())
    print(checked.stdout.strip())
    cfn = subprocess.run([ROOT / ".venv/bin/cfn-lint", *STACKS], capture_output=True, text=True)
    print(cfn.stdout.strip() or f"cfn-lint: {len(STACKS)} stacks, nothing found")
    documents = {f"{stack.name}: {name}": document for stack in STACKS for name, document in policies(stack).items()}
    problems = [f"{name}: {problem}" for name, document in documents.items() for problem in policy_problems(document)]
    print("\n".join(problems) or f"cloudsplaining: {len(documents)} policies, nothing found")
    return int(checked.returncode != 0 or "Skipped: 0" not in checked.stdout or cfn.returncode != 0 or bool(problems))


if __name__ == "__main__":
    sys.exit(main())
