"""kube-score finds nothing that is not answered, in any environment, with or without a queue, and finds what is planted."""

import pytest
import score
from chart import ROOT, helm_template, tool

STAGING = ROOT / "environments/staging/values.yaml"


def unanswered(manifest: str) -> set[score.Finding]:
    return {finding for finding in score.findings(manifest) if score.answer(finding) is None}


def test_every_finding_is_answered_and_every_answer_has_its_finding(capsys):
    assert tool("kube-score")
    assert score.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "container-security-context-readonlyrootfilesystem"),
        ("allowPrivilegeEscalation: false", "privileged: true", "container-security-context-privileged"),
        (':0.1.0"', ':latest"', "container-image-tag"),
        ("seccompProfile:", "seLinuxOptions:", "container-seccomp-profile"),
        ("ray-finetune.io/name", "example.com/name", "pod-networkpolicy"),
    ],
)
def test_a_planted_fault_is_found_in_every_pod_and_job_that_has_it(right, wrong, check):
    manifest = helm_template(STAGING, release="ray-finetune", arguments=tuple(score.VARIANTS["a run with a queue"])).stdout
    assert unanswered(manifest) == set()
    if check == "pod-networkpolicy":  # the policy still selects by the right label
        head, kind, rest = manifest.partition("kind: NetworkPolicy")
        policy, separator, others = rest.partition("---")
        planted = head + kind + policy + separator + others.replace(right, wrong)
    else:
        planted = manifest.replace(right, wrong)
    found = {where for name, where, _ in unanswered(planted) if name == check}
    assert found >= (
        {"head", "worker", "test", "check"} if check == "container-image-tag" else {"head", "worker", "submitter", "test", "check"}
    )


def test_an_answer_that_nothing_asks_for_is_an_error(monkeypatch, capsys):
    monkeypatch.setitem(score.ANSWERS, ("label-values", "all", "wrong"), "never")
    assert score.main() == 1
    assert "nothing asks for the answer to ('label-values'" in capsys.readouterr().out
