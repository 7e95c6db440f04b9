"""Eight rounds of chaos, chosen so that each kind of fault strikes, well before the run would have ended."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos as module
import pytest
from chaos import FAULTS, S3_FAULTS, Attempt, WrongError, chaos
from processes import CONTEXT

ROUNDS = [4, 7, 31, 35, 55, 172, 204, 307]  # even ones on a disk, odd ones in S3


def test_whatever_strikes_a_run_goes_on_from_its_newest_checkpoint_to_the_undisturbed_runs_weights() -> None:
    said: list[str] = []
    found, _ = chaos(ROUNDS, said.append)
    assert not found["wrong"], "\n".join(said)
    assert {name.partition(":")[0] for name in found} >= {*FAULTS, *S3_FAULTS}, "\n".join(said)


@pytest.mark.parametrize(
    ("wait", "wrong"),
    [
        (Attempt.wait, "the workers had not ended within 1 s"),
        (lambda attempt: attempt.at_step(3), "step 3 was not reached within 1 s"),
    ],
    ids=["for the end", "for a step"],
)
def test_workers_that_hang_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Attempt], Any], wrong: str
) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 1)
    process = CONTEXT.Process(target=time.sleep, args=(600,))
    process.start()
    attempt = Attempt(1, tmp_path / "log", [process])
    with pytest.raises(WrongError, match=wrong):
        wait(attempt)
    attempt.end()
