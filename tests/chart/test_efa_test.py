"""`make efa-test`: what it renders is the chart's EFA test alone, and what it asks of kubectl leaves nothing behind.

kubectl's answers are stand-ins here, since the test needs EFA; what is rendered is the chart's.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from chart import ROOT, parse, tool

SCRIPT = ROOT / "tests/tools/efa-test.sh"


def efa_test(*arguments: str, path: str = "/usr/bin:/bin", **variables: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as tools:  # with helm alone: where a cluster was made here, kubectl lies beside it
        Path(tools, "helm").symlink_to(tool("helm"))
        environment = {"PATH": f"{tools}:{path}", "HOME": os.environ["HOME"], **variables}
        return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture
def kubectl(tmp_path):
    """Answers `get job` with what ENDED says, and writes down what it is asked."""
    script = tmp_path / "kubectl"
    script.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> {tmp_path}/asked\n'
        f'[[ "$*" == *"apply --filename -"* ]] && cat > {tmp_path}/applied\n'
        f'[[ "$*" == *"delete --filename -"* ]] && cat > {tmp_path}/deleted\n'
        '[[ "$*" == *" get job "* ]] && { [[ "$ENDED" == lost ]] && exit 1; echo "$ENDED"; }\n'
        "exit 0\n"
    )
    script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("environment", ["staging", "production"])
def test_it_renders_the_efa_test_of_an_environment_and_nothing_else(environment):
    result = efa_test("--print", environment)
    assert result.returncode == 0, result.stderr
    objects = parse(result.stdout)
    assert list(objects) == ["Job"]
    assert objects["Job"]["metadata"]["name"] == "ray-finetune-efa-test"
    assert objects["Job"]["spec"]["completions"] == 2
    limits = objects["Job"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["vpc.amazonaws.com/efa"] == {"staging": "1", "production": "16"}[environment]


def test_the_pods_are_found_by_the_name_of_the_job(kubectl):
    job = parse(efa_test("--print", "staging").stdout)["Job"]["metadata"]["name"]
    efa_test("staging", path=f"{kubectl}:/usr/bin:/bin", ENDED="Complete")
    assert f"logs --selector batch.kubernetes.io/job-name={job}" in (kubectl / "asked").read_text()


@pytest.mark.parametrize("ended", ["Complete", "SuccessCriteriaMet Complete", "FailureTarget Failed", "lost"])
def test_it_applies_waits_prints_the_log_and_removes_all_that_it_applied(kubectl, ended):
    result = efa_test("staging", path=f"{kubectl}:/usr/bin:/bin", ENDED=ended, POLL_SECONDS="0")
    assert result.returncode == (0 if "Complete" in ended else 1)
    verbs = [line.split()[2] for line in (kubectl / "asked").read_text().splitlines()]
    assert verbs == ["apply", *["get"] * (6 if ended == "lost" else 2), "logs", "delete"]
    assert (kubectl / "applied").read_text() == (kubectl / "deleted").read_text() == efa_test("--print", "staging").stdout
    assert "ray-finetune-staging" in (kubectl / "asked").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Which environment's nodes? Write make efa-test ENV=NAME, with one of: production smoke staging."),
        (["stagin"], "There is no environments/stagin/values.yaml; ENV can be one of: production smoke staging."),
    ],
    ids=["no environment", "an unknown one"],
)
def test_a_missing_environment_is_one_line(arguments, line):
    result = efa_test(*arguments)
    assert (result.returncode, result.stderr) == (1, line + "\n")


def test_a_missing_kubectl_is_one_line(tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    result = efa_test("staging", path=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("kubectl is needed")
    assert result.stderr.count("\n") == 1


def test_an_environment_without_efa_is_refused_with_the_charts_own_sentence():
    result = efa_test("smoke")
    assert result.returncode == 1
    assert "efa.test is true, but workers ask for no EFA interface" in result.stderr
