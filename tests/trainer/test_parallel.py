"""The same step at any number of processes, and packed rows that do not see each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from tiny import FAMILIES, settings
from training import loss_and_gradients, step_facts

RESHARDED = -2  # two processes whose weights are freed between forward and backward


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Facts of step 1 by number of processes: one, two, and three, which have a short rank."""
    values = settings(tmp_path_factory.mktemp("steps"), batch={"sequences": 4, "micro_batch": 1}, optim={"clip_norm": 0.5})
    return {size: run_processes(size, step_facts, values) for size in (1, 2, 3)} | {
        RESHARDED: run_processes(2, step_facts, values, 0)
    }


@pytest.mark.parametrize("size", [2, 3, RESHARDED])
def test_loss_and_gradients_are_the_same_at_any_number_of_processes(steps: Any, size: int) -> None:
    alone = steps[1][0]
    for facts in steps[size]:
        assert facts["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert facts["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in facts["gradients"].items():
            assert relative(gradient, alone["gradients"][name]) < 1e-5, name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_norm_is_that_of_the_whole_model_before_and_after_clipping(steps: Any, size: int) -> None:
    for facts in steps[size]:
        assert facts["norm"] == pytest.approx(steps[1][0]["norm"], rel=1e-5)
        assert facts["norm"] > 0.5
        assert facts["norm_after"] == pytest.approx(0.5, rel=1e-4)
        whole = sum(gradient.square().sum().item() for gradient in facts["gradients"].values()) ** 0.5
        assert whole == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_no_process_holds_the_whole_model(steps: Any, size: int) -> None:
    assert sum(facts["own"] for facts in steps[size]) == steps[size][0]["all"]
    assert max(facts["own"] for facts in steps[size]) <= steps[size][0]["all"] / size * 1.05


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_loss_and_gradients_of_rows_alone(tmp_path: Path, family: str) -> None:
    values = settings(tmp_path, family, data={"sequence_length": 256})
    rows = list(range(8))
    [packed] = run_processes(1, loss_and_gradients, values, [rows[:5], rows[5:]])
    [alone] = run_processes(1, loss_and_gradients, values, [[row] for row in rows])
    assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for name, gradient in packed["gradients"].items():
        assert relative(gradient, alone["gradients"][name]) < 1e-5, name
