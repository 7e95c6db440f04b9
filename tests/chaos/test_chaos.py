"""Eight rounds of chaos, chosen so that each kind of fault strikes, well before the run would have ended."""

from chaos import FAULTS, S3_FAULTS, chaos

ROUNDS = [4, 7, 31, 35, 55, 172, 204, 307]  # even ones on a disk, odd ones in S3


def test_whatever_strikes_a_run_goes_on_from_its_newest_checkpoint_to_the_undisturbed_runs_weights() -> None:
    said: list[str] = []
    found = chaos(ROUNDS, said.append, [])
    assert not found["wrong"], "\n".join(said)
    assert {name.partition(":")[0] for name in found} >= {*FAULTS, *S3_FAULTS}, "\n".join(said)
