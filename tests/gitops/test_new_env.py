"""`make new-env` writes a folder that renders as all others do, or says in one sentence why it doesn't."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gitops import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the command reads and writes."""
    for folder in ("charts", "environments", "tests/tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".tools").symlink_to(ROOT / ".tools")
    return tmp_path


def new_env(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tree / "tests/tools/new_env.py", *arguments], capture_output=True, text=True)


def files(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.glob("environments/*/*.yaml"))


@pytest.mark.parametrize(("instance", "nodes", "gpus"), [("g6.12xlarge", "2", 4), ("p5en.48xlarge", "4", 8), ("g5.xlarge", "1", 1)])
def test_a_new_environment_renders_and_holds_what_was_asked_for(tree, instance, nodes, gpus):
    before = files(tree)
    assert new_env(tree, "research", instance, nodes).returncode == 0
    assert set(files(tree)) - set(before) == {"environments/research/values.yaml", "environments/research/environment.yaml"}
    values = tree / "environments/research/values.yaml"
    command = [ROOT / ".tools/bin/helm", "template", "ray-finetune", ROOT / "charts/ray-finetune", "--kube-version", "1.34.0"]
    output = subprocess.run([*command, "-f", values], capture_output=True, text=True, check=True).stdout
    (job,) = (document for document in yaml.safe_load_all(output) if document and document["kind"] == "RayJob")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["maxReplicas"] == int(nodes)
    spec = group["template"]["spec"]
    assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == instance
    assert int(spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == gpus
    assert yaml.safe_load(values.read_text())["trainer"]["storage"]["uri"] == "s3://ray-finetune-research/runs"
    staging = tree / "environments/staging/environment.yaml"
    assert (tree / "environments/research/environment.yaml").read_text() == staging.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["", "g6.12xlarge", "2"], "A new environment needs a name, an instance type and nodes: make new-env NAME="),
        (["staging", "g6.12xlarge", "2"], "environments/staging exists already: choose another NAME"),
        (["platform", "g6.12xlarge", "2"], "environments/platform exists already: choose another NAME"),
        (["../up", "g6.12xlarge", "2"], "NAME is ../up, which becomes part of a namespace: write at most 40 of a-z"),
        (["Research", "g6.12xlarge", "2"], "NAME is Research, which becomes part of a namespace"),
        (
            ["research", "g6.12xlrge", "2"],
            "INSTANCE is g6.12xlrge, which the chart does not know: write one of its types, such as g6.12x",
        ),
        (["research", "g6.12xlarge", "0"], "NODES is 0: write the number of nodes, such as 2."),
        (["research", "g6.12xlarge", "two"], "NODES is two: write the number of nodes, such as 2."),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_and_nothing_is_written(tree, arguments, sentence):
    before = files(tree)
    result = new_env(tree, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(sentence)
    assert len(result.stderr.splitlines()) == 1
    assert files(tree) == before


def test_a_folder_that_the_chart_refuses_is_not_left_behind(tree):
    template = tree / "environments/values.yaml.template"
    template.write_text(template.read_text().replace("nodes:", "node:"))
    before = files(tree)
    result = new_env(tree, "research", "g6.12xlarge", "2")
    assert result.returncode == 2
    assert "'node'" in result.stderr
    assert files(tree) == before
    assert not (tree / "environments/research").exists()
