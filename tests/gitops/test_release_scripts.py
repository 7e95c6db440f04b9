"""The scripts of .github/workflows/release.yaml, where they need neither registry nor GitHub; `make release-rehearsal` runs the rest."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from gitops import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the scripts read, as a repository of its own."""
    for folder in (".github/scripts", "environments", "charts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *command], cwd=tmp_path, check=True)
    return tmp_path


def script(clone: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([clone / f".github/scripts/{name}.sh", *arguments], cwd=clone, capture_output=True, text=True)


def version_of(clone: Path, environment: str) -> str:
    return yaml.safe_load((clone / f"environments/{environment}/environment.yaml").read_text())["chartVersion"]


def test_an_environment_is_moved_and_no_other_file_is_touched(clone):
    assert script(clone, "promote", "staging", "99.1.0").returncode == 0
    assert version_of(clone, "staging") == "99.1.0"
    assert version_of(clone, "production") != "99.1.0"
    changed = subprocess.run(["git", "diff", "--name-only"], cwd=clone, capture_output=True, text=True).stdout.split()
    assert changed == ["environments/staging/environment.yaml"]


def test_an_environment_that_has_the_version_is_left_as_it_is(clone):
    result = script(clone, "promote", "staging", version_of(clone, "staging"), "--pull-request")
    assert result.returncode == 0
    assert result.stdout.startswith("staging has ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stagin", "1.0.0"], "There is no environments/stagin/environment.yaml: ENV names a folder under environments/."),
        (["", "1.0.0"], "There is no environments//environment.yaml"),
        (["staging", "v1.0.0"], "v1.0.0 is no version; write one like 0.2.0."),
        (["staging", "1.0.0; rm -r ."], "1.0.0; rm -r . is no version"),
    ],
)
def test_what_cannot_be_promoted_is_refused(clone, arguments, sentence):
    result = script(clone, "promote", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(sentence)


def test_notes_are_the_versions_section_with_the_references(clone):
    (clone / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0]\n\n- new\n\n## [0.1.0]\n\n- old\n")
    notes = script(clone, "release-notes", "v0.2.0", "image@sha256:1", "chart@sha256:2").stdout
    assert notes.split() == ["-", "new", "Image:", "image@sha256:1", "Chart:", "chart@sha256:2"]
    assert script(clone, "release-notes", "v0.3.0", "i", "c").returncode == 1


@pytest.mark.parametrize("file", ["pyproject.toml", "charts/ray-finetune/Chart.yaml"])
def test_versions_that_differ_are_found(clone, file):
    assert script(clone, "version").returncode == 0
    path = clone / file
    path.write_text(path.read_text().replace("version: 0.", "version: 9.").replace('version = "0.', 'version = "9.'))
    result = script(clone, "version")
    assert result.returncode == 1
    assert "give them one version" in result.stderr


def test_only_a_digest_is_signed(clone):
    result = script(clone, "sign", "registry.example/image:0.1.0")
    assert result.returncode == 2
    assert "a tag may move" in result.stderr
