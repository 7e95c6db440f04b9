"""The same step at any number of processes, and packed rows that do not see each other."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_processes
from tiny import FAMILIES, build_tokenizer, config, settings
from training import loss_and_gradients, step_facts

from trainer.data import Plan, tokenize

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


def test_every_row_is_trained_on_once_an_epoch_in_the_same_steps_at_any_number_of_workers(tmp_path: Path) -> None:
    from trainer.data import micro_batches

    made = config(tmp_path, duration={"steps": None, "epochs": 3}, batch={"sequences": 5, "micro_batch": 2})
    tokens = tokenize(made.data.train, build_tokenizer(), made)
    plan = Plan(tokens, made)
    seen = [row for step in range(1, plan.num_steps + 1) for number in plan.step_packs(step) for row in plan.rows(number)]
    assert sorted(seen) == sorted(list(range(40)) * 3)
    assert len({tuple(seen[i : i + 40]) for i in (0, 40, 80)}) == 3

    for step in range(1, plan.num_steps + 1):
        packs = [plan.rows(number) for number in plan.step_packs(step)]
        fed = {}
        for size in (1, 2, 3):
            shares = [micro_batches(tokens, packs, made, rank, size) for rank in range(size)]
            assert len({len(share) for share in shares}) == 1
            sequences = [ids for share in shares for batch in share for ids in batch.input_ids if ids.any()]
            fed[size] = sorted(json.dumps(ids.tolist()) for ids in sequences)
        assert fed[1] == fed[2] == fed[3]
        assert len(fed[1]) == len(packs)


def test_the_order_changes_with_the_epoch_and_the_seed_and_with_nothing_else(tmp_path: Path) -> None:
    made = [config(tmp_path, seed=seed, log_every_steps=every) for seed, every in ((1, 1), (1, 5), (2, 1))]
    tokens = tokenize(made[0].data.train, build_tokenizer(), made[0])
    orders = [np.concatenate(Plan(tokens, one).epoch_packs(0)).tolist() for one in made]
    assert orders[0] == orders[1] != orders[2]
