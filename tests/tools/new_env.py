"""Writes a new environment, which Argo CD finds by its folder: `make new-env NAME=research INSTANCE=g6.12xlarge NODES=2`.

    python tests/tools/new_env.py NAME INSTANCE NODES

Exit code 2, with one sentence, where the name is taken or no name, or the instance type or number of nodes can't be. A folder that
the chart refuses to render is not left behind.
"""

import difflib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template

import yaml

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "environments"
CHART = ROOT / "charts/ray-finetune"


def refusal(name: str, instance: str, nodes: str) -> str | None:
    if not name or not instance or not nodes:
        return (
            "A new environment needs a name, an instance type and nodes: make new-env NAME=research INSTANCE=g6.12xlarge NODES=2."
        )
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        return (
            f"NAME is {name}, which becomes part of a namespace: write at most 40 of a-z, 0-9 and -, a letter first and no - last."
        )
    if (ENVIRONMENTS / name).exists():
        return f"environments/{name} exists already: choose another NAME, or edit its values.yaml."
    types = list(yaml.safe_load((CHART / "files/instance-types.yaml").read_text()))
    if instance not in types:
        near = difflib.get_close_matches(instance, types, 1, 0)[0]
        return f"INSTANCE is {instance}, which the chart does not know: write one of its types, such as {near}."
    if not re.fullmatch(r"[1-9]\d{0,3}", nodes):
        return f"NODES is {nodes}: write the number of nodes, such as 2."
    return None


def write(name: str, instance: str, nodes: str) -> Path:
    text = (ENVIRONMENTS / "values.yaml.template").read_text()
    folder = ENVIRONMENTS / name
    folder.mkdir()
    (folder / "values.yaml").write_text(Template(text).substitute(name=name, instance=instance, nodes=nodes))
    # It begins with the version that staging runs.
    shutil.copy(ENVIRONMENTS / "staging/environment.yaml", folder)
    return folder


def main() -> int:
    name, instance, nodes = sys.argv[1:]
    refused = refusal(name, instance, nodes)
    if refused:
        print(refused, file=sys.stderr)
        return 2
    folder = write(name, instance, nodes)
    command = [ROOT / ".tools/bin/helm", "template", "ray-finetune", CHART, "--kube-version", "1.34.0"]
    rendered = subprocess.run([*command, "--values", folder / "values.yaml"], capture_output=True, text=True)
    if rendered.returncode != 0:
        shutil.rmtree(folder)
        print(rendered.stderr.strip(), file=sys.stderr)
        return 2
    print(f"environments/{name} is written: put your model, data and bucket into its values.yaml, then commit it.")
    print("Its bucket and role: environments/platform/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
