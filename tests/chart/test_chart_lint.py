"""Chart.yaml is what chart-testing takes, and a chart that differs from the last release has a higher version."""

import subprocess

import lint_chart
import pytest
import yaml
from chart import CHART, ROOT

CHART_YAML = (CHART / "Chart.yaml").read_text()


@pytest.fixture
def repository(tmp_path):
    """A repository with the chart's own Chart.yaml and values.yaml, released as v0.1.0."""
    folder = tmp_path / lint_chart.CHART
    (folder / "tests").mkdir(parents=True)
    (folder / "Chart.yaml").write_text(yaml.safe_dump({**yaml.safe_load(CHART_YAML), "version": "0.1.0"}))
    (folder / "values.yaml").write_text("a: 1\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    git(tmp_path, "tag", "v0.1.0")
    return tmp_path


def git(root, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def commit(root):
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "x")


def with_version(root, version):
    file = root / lint_chart.CHART / "Chart.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "version": version}))


def test_this_chart_is_as_chart_testing_wants_it():
    assert lint_chart.problems(ROOT) == []


WRONG = {
    "a version that is none": ({"version": "1.0"}, "version"),
    "a number as version": ({"version": 1}, "version"),
    "no maintainers": ({"maintainers": []}, "maintainers"),
    "a maintainer without a name": ({"maintainers": [{"url": "https://example.com"}]}, "maintainers"),
    "a maintainer who cannot be reached": ({"maintainers": [{"name": "somebody"}]}, "somebody has neither email nor url"),
    "an unknown key": ({"maintainer": "x"}, "maintainer"),
    "no description": ({"description": ""}, "description"),
    "an old format": ({"apiVersion": "v1"}, "apiVersion"),
    "an annotation that is no text": ({"annotations": {"a": 1}}, "annotations"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_chart_yaml_that_chart_testing_refuses_is_found(repository, change, words):
    file = repository / lint_chart.CHART / "Chart.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(CHART_YAML), **change}))
    found = lint_chart.problems(repository)
    assert found
    assert words in found[0]


def test_a_changed_chart_needs_a_higher_version(repository):
    (repository / lint_chart.CHART / "values.yaml").write_text("a: 2\n")
    for step in (lambda: None, lambda: commit(repository)):  # in the working tree, then committed
        step()
        wrong, _ = lint_chart.version_problem(repository)
        assert wrong
        assert f"such as {lint_chart.CHART}/values.yaml, but its version is 0.1.0: raise it above 0.1.0" in wrong
    with_version(repository, "0.1.1")
    assert lint_chart.version_problem(repository)[0] is None
    with_version(repository, "0.0.9")
    assert lint_chart.version_problem(repository)[0]


def test_an_unchanged_chart_and_a_change_that_is_not_packaged_need_none(repository):
    (repository / lint_chart.CHART / "tests/x_test.yaml").write_text("x: 1\n")
    (repository / "README.md").write_text("x\n")
    commit(repository)
    wrong, compared = lint_chart.version_problem(repository)
    assert wrong is None
    assert "the same files" in compared


def test_without_a_release_it_says_that_nothing_was_compared(repository):
    git(repository, "tag", "--delete", "v0.1.0")
    wrong, compared = lint_chart.version_problem(repository)
    assert wrong is None
    assert compared.startswith("the version was not compared: no release's tag")


def test_versions_are_ordered_as_semver_orders_them():
    versions = [
        "0.1.0-alpha.1",
        "0.1.0-alpha.2",
        "0.1.0-alpha.10",
        "0.1.0-alpha.beta",
        "0.1.0-rc.1",
        "0.1.0",
        "0.1.1",
        "0.9.0",
        "0.10.0",
        "1.0.0",
    ]
    assert sorted(set(versions), key=lint_chart.order) == versions


def test_the_files_that_chart_testing_is_told_of_exist_and_are_those_of_make_verify():
    config = yaml.safe_load((ROOT / "ct.yaml").read_text())
    assert ROOT / config["chart-yaml-schema"] == lint_chart.SCHEMA
    assert (ROOT / config["lint-conf"]).exists()
    assert [CHART.parent] == [ROOT / folder for folder in config["chart-dirs"]]


def test_what_is_not_packaged_is_what_helmignore_says():
    ignored = {line.strip("/") for line in (CHART / ".helmignore").read_text().split() if line.startswith("/")}
    assert ignored == set(lint_chart.UNPACKAGED)
