"""The same step at any number of processes, and packed rows that do not see each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from tiny import FAMILIES, settings
from training import loss_and_gradients, step_facts, two_steps

# Two processes that keep weights for a step or for a block, and make activations again: by what step_facts is given.
VARIANTS = {"step": ("step", 0), "block": ("block", 0), "recomputed": ("pass", 2), "all": ("step", 1)}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """Facts of step 1 by number of processes, one, two, and three, which have a short rank, and by variant."""
    values = settings(tmp_path_factory.mktemp("steps"), batch={"sequences": 4, "micro_batch": 1}, optim={"clip_norm": 0.5})
    return {size: run_processes(size, step_facts, values) for size in (1, 2, 3)} | {
        name: run_processes(2, step_facts, values, *arguments) for name, arguments in VARIANTS.items()
    }


@pytest.mark.parametrize("size", [2, 3, *VARIANTS])
def test_loss_and_gradients_are_the_same_at_any_number_of_processes(steps: Any, size: int | str) -> None:
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


def test_alone_it_computes_in_bfloat16_with_float32_weights_and_gradients_that_are_seen_by_the_next_step(tmp_path: Path) -> None:
    values = settings(tmp_path, batch={"sequences": 4, "micro_batch": 1}, optim={"lr": 3e-2}, schedule={"warmup_steps": 0})
    mine, plain = (run_processes(1, two_steps, values, fast)[0] for fast in (True, False))
    again = run_processes(1, two_steps, values, True, 2)[0]
    assert again["losses"] == mine["losses"]
    assert all(torch.equal(again["gradients"][name], gradient) for name, gradient in mine["gradients"].items())
    assert mine["types"] == {torch.float32}
    assert plain["losses"][0] - plain["losses"][1] > 0.3
    assert mine["losses"] == pytest.approx(plain["losses"], rel=0.01)
    for name, gradient in plain["gradients"].items():
        assert (mine["gradients"][name] - gradient).norm() < 0.2 * gradient.norm(), name
