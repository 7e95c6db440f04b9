"""Order, packing and each rank's share: every row in its place, at any number of workers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import build, chat, data_config, write_lines
from tiny import config, write_rows

from trainer.config import InputError, TrainerConfig
from trainer.packing import IGNORED, Plan, epoch_order, micro_batches, num_tokens, pack, total_weight
from trainer.tokens import COLUMNS, Tokens

GOOD = chat(("user", "red"), ("assistant", "blue stone"))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=300), st.integers(0, 2**31))
def test_packing_places_every_row_once_and_never_overflows(lengths: list[int], seed: int) -> None:
    sizes = np.asarray(lengths)
    packs = pack(sizes, 64, np.random.default_rng(seed).permutation(len(sizes)))
    assert sorted(packs.rows.tolist()) == list(range(len(sizes)))
    sums = [int(sizes[packs[number]].sum()) for number in range(len(packs))]
    assert max(sums) <= 64
    assert sum(size <= 32 for size in sums) <= 1


def test_packing_is_97_percent_full_on_log_normal_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 0.9, 4000).astype(int), 8, 4096)
    packs = pack(lengths, 4096, np.arange(len(lengths)))
    assert lengths.sum() / (len(packs) * 4096) > 0.97


def made_of(sources: list[int]) -> Tokens:
    rows = {name: np.zeros(len(sources), dtype) for name, dtype in COLUMNS.items()}
    return Tokens(**rows | {"sources": np.array(sources, np.int32)})


def test_an_epoch_sees_each_source_as_often_as_its_weight_says() -> None:
    tokens = made_of([0] * 10 + [1] * 7 + [2] * 5)
    weights = [1.0, 0.5, 2.4]
    epochs = [np.bincount(epoch_order(tokens, weights, 3, epoch), minlength=22) for epoch in range(5)]
    for counts in epochs:
        assert counts[:10].tolist() == [1] * 10
        assert counts[10:17].sum() in (3, 4)
        assert set(counts[17:]) == {2, 3}
        assert counts[17:].sum() == 12
    assert np.sum(epochs[:2], 0)[10:17].tolist() == [1] * 7
    assert np.sum(epochs, 0)[17:].tolist() == [12] * 5


def test_the_order_changes_with_the_epoch_and_the_seed_and_with_nothing_else(tmp_path: Path) -> None:
    made = [config(tmp_path, seed=seed, log_every_steps=every) for seed, every in ((1, 1), (1, 5), (2, 1))]
    _, tokens = build(made[0])
    orders = [[plan.epoch_packs(epoch)[0].rows.tolist() for epoch in (0, 1)] for plan in (Plan(tokens, one) for one in made)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]


def test_every_row_is_trained_on_once_an_epoch_in_the_same_steps_at_any_number_of_workers(tmp_path: Path) -> None:
    made = config(tmp_path, duration={"steps": None, "epochs": 3}, batch={"sequences": 5, "micro_batch": 2})
    _, tokens = build(made)
    plan = Plan(tokens, made)
    seen = [row for step in range(1, plan.num_steps + 1) for rows in plan.step_packs(step) for row in rows.tolist()]
    assert sorted(seen) == sorted(list(range(40)) * 3)
    assert len({tuple(seen[i : i + 40]) for i in (0, 40, 80)}) == 3

    for step in range(1, plan.num_steps + 1):
        packs = plan.step_packs(step)
        fed = {}
        for size in (1, 2, 3):
            shares = [list(micro_batches(tokens, packs, made, rank, size)) for rank in range(size)]
            assert len({len(share) for share in shares}) == 1
            sequences = [ids for share in shares for batch in share for ids in batch.input_ids if ids.any()]
            fed[size] = sorted(json.dumps(ids.tolist()) for ids in sequences)
        assert fed[1] == fed[2] == fed[3]
        assert len(fed[1]) == len(packs)


def test_labels_are_the_next_token_with_its_rows_weight_and_never_a_rows_first(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD, GOOD | {"weight": 2.5}, {"text": "red"}])
    one = data_config(path)
    _, tokens = build(one)
    packs = [np.array([0, 1, 2])]
    [batch] = micro_batches(tokens, packs, one, 0, 1)
    ids, positions, labels, weights = (
        tensor[0].tolist() for tensor in (batch.input_ids, batch.position_ids, batch.labels, batch.weights)
    )
    first, second, third = tokens.lengths.tolist()
    used = first + second + third
    assert positions[:used] == [*range(first), *range(second), *range(third)]
    assert positions[used:] == list(range(128 - used))
    row_of = [0] * first + [1] * second + [2] * third
    for at, (label, weight) in enumerate(zip(labels, weights, strict=True)):
        if label == IGNORED:
            assert weight == 0
        else:
            assert (ids[at + 1], row_of[at + 1]) == (label, row_of[at])
            assert tokens.supervised[at + 1]
            assert weight == tokens.weights[row_of[at]]
    assert sum(weights) == total_weight(tokens, packs) == tokens.labels[0] + 2.5 * tokens.labels[1] + tokens.labels[2]
    assert sum(label != IGNORED for label in labels) == tokens.labels.sum()


@pytest.mark.parametrize("weight", [0.001, 1e-12])
@pytest.mark.parametrize("duration", [{"epochs": 1}, {"steps": 3}])
def test_a_mixture_whose_weights_leave_nothing_of_the_rows_is_refused(
    tmp_path: Path, weight: float, duration: dict[str, int]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [GOOD] * 5)
    values: dict[str, Any] = data_config(path).model_dump() | {"duration": duration}
    values["data"]["train"] = [{"path": str(path), "weight": weight}]
    one = TrainerConfig.model_validate(values)
    with pytest.raises(
        InputError, match=rf"data\.train: weights of {weight:g} leave less than a row an epoch of 5 rows; raise them"
    ):
        Plan(build(one)[1], one)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_few_rows_still_give_every_rank_the_same_number_of_micro_batches(tmp_path: Path, rows: int, size: int) -> None:
    values: dict[str, Any] = data_config(write_lines(tmp_path / "rows.jsonl", [GOOD] * rows), sequence_length=32).model_dump()
    values |= {"batch": {"sequences": 8, "micro_batch": 2}, "duration": {"epochs": 1}}
    one = TrainerConfig.model_validate(values)
    _, tokens = build(one)
    plan = Plan(tokens, one)
    assert plan.num_steps == 1
    packs = plan.step_packs(1)
    shares = [list(micro_batches(tokens, packs, one, rank, size)) for rank in range(size)]
    assert {len(share) for share in shares} == {len(shares[0])}
    assert len(shares[0]) >= 1
    labels = sum(int((batch.labels != IGNORED).sum()) for share in shares for batch in share)
    assert labels == total_weight(tokens, packs) > 0


def test_a_run_in_tokens_ends_with_the_step_that_reaches_them(tmp_path: Path) -> None:
    one = config(tmp_path, duration={"steps": None, "tokens": 5000})
    _, tokens = build(one)
    plan = Plan(tokens, one)
    by_step = [num_tokens(tokens, plan.step_packs(step)) for step in range(1, plan.num_steps + 1)]
    assert sum(by_step) >= 5000 > sum(by_step[:-1])


def test_rows_that_are_selected_keep_their_tokens(tmp_path: Path) -> None:
    _, tokens = build(data_config(write_rows(tmp_path / "rows.jsonl", 12)))
    chosen = tokens.select(np.array([7, 2]))
    assert [chosen[0][0].tolist(), chosen[1][0].tolist()] == [tokens[7][0].tolist(), tokens[2][0].tolist()]
