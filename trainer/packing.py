"""From tokenised rows to the micro-batches of a step: order, packing, and the share of each rank.

All of it is a pure function of (lengths, sources, seed, epoch), so a step's content needs no state to be saved and is
the same at any number of workers. A change that orders the same rows differently raises config.ORDER_VERSION.
"""

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config import InputError, TrainerConfig
from trainer.tokens import Tokens

IGNORED = -100  # torch's cross entropy skips this label
PACKING_WINDOW = 2048  # rows among which packing looks for the best fit; part of ORDER_VERSION


@dataclass(frozen=True)
class Packs:
    """Row numbers of packed sequences, end to end: sequence i holds rows[bounds[i]:bounds[i + 1]]."""

    rows: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.rows[self.bounds[number] : self.bounds[number + 1]]


def pack(lengths: np.ndarray, capacity: int, order: np.ndarray) -> Packs:
    """Packs rows into sequences of `capacity` tokens: best fit, longest row first, over consecutive windows of `order`."""
    rows: list[int] = []
    sizes: list[int] = []
    for start in range(0, len(order), PACKING_WINDOW):
        window = order[start : start + PACKING_WINDOW]
        packs: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, number of the pack), sorted
        by_length = window[np.argsort(-lengths[window], kind="stable")]
        for row, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
            at = bisect.bisect_left(room, (length, -1))
            left, number = room.pop(at) if at < len(room) else (capacity, len(packs))
            if number == len(packs):
                packs.append([])
            packs[number].append(row)
            if left > length:
                bisect.insort(room, (left - length, number))
        for pack_rows in packs:
            rows.extend(pack_rows)
            sizes.append(len(pack_rows))
    return Packs(np.asarray(rows, np.int64), np.cumsum([0, *sizes], dtype=np.int64))


def epoch_order(tokens: Tokens, weights: list[float], seed: int, epoch: int) -> np.ndarray:
    """Row numbers in the order of an epoch: source s's rows `weights[s]` times each, all of them shuffled together.

    A fraction of a source goes on, epoch after epoch, where the last one stopped: at weight 0.5 two epochs see each
    row once.
    """
    parts = []
    for source, weight in enumerate(weights):
        rows = np.flatnonzero(tokens.sources == source) if len(weights) > 1 else np.arange(len(tokens))
        if weight != 1:
            endless = np.arange(round(weight * len(rows) * epoch), round(weight * len(rows) * (epoch + 1)))
            shuffled = np.random.Generator(np.random.Philox(key=[seed, 2**32 + source])).permutation(rows)
            rows = shuffled[endless % len(rows)] if len(rows) else rows
        parts.append(rows)
    rows = np.concatenate(parts)
    return rows[_generator(seed, epoch).permutation(len(rows))]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


class Plan:
    """Which rows each step trains on: an endless line of packs, epoch after epoch, cut into steps."""

    def __init__(self, tokens: Tokens, config: TrainerConfig):
        self.tokens = tokens
        self.config = config
        self.first_pack = [0]  # global number of each epoch's first pack
        self.epoch_packs = functools.lru_cache(maxsize=2)(self._epoch_packs)
        if not len(self.epoch_packs(0)[0]):
            weights = ", ".join(f"{source.weight:g}" for source in config.data.train)
            raise InputError(f"data.train: weights of {weights} leave less than a row an epoch of {len(tokens):,} rows; raise them")
        self.num_packs = self._count_packs()
        self.num_steps = -(-self.num_packs // config.batch.sequences)

    def _epoch_packs(self, epoch: int) -> tuple[Packs, np.ndarray]:
        weights = [source.weight for source in self.config.data.train]
        order = epoch_order(self.tokens, weights, self.config.seed, epoch)
        packs = pack(self.tokens.lengths, self.config.data.sequence_length, order)
        # Best fit leaves the fullest packs in front: shuffle, so that a step's rows have no bias of length.
        return packs, _generator(self.config.seed, epoch + 2**33).permutation(len(packs))

    def rows(self, number: int) -> np.ndarray:
        """Row numbers of pack `number`, counted from the run's start."""
        while self.first_pack[-1] <= number:
            self.first_pack.append(self.first_pack[-1] + len(self.epoch_packs(len(self.first_pack) - 1)[0]))
        epoch = bisect.bisect_right(self.first_pack, number) - 1
        packs, shuffle = self.epoch_packs(epoch)
        return packs[shuffle[number - self.first_pack[epoch]]]

    def step_packs(self, step: int) -> list[np.ndarray]:
        """Row numbers of each pack of `step`, which counts from 1; the last step may have fewer packs."""
        size = self.config.batch.sequences
        return [self.rows(number) for number in range((step - 1) * size, min(step * size, self.num_packs))]

    def _count_packs(self) -> int:
        duration = self.config.duration
        if duration.steps is not None:
            return duration.steps * self.config.batch.sequences
        if duration.epochs is not None:
            return sum(len(self.epoch_packs(epoch)[0]) for epoch in range(duration.epochs))
        size, seen, number = self.config.batch.sequences, 0, 0
        while seen < (duration.tokens or 0):
            seen += sum(int(self.tokens.lengths[self.rows(number + i)].sum()) for i in range(size))
            number += size
        return number


# ---- micro-batches ----


@dataclass(frozen=True)
class MicroBatch:
    """Sequences for one forward pass, each [micro_batch, sequence_length].

    `labels` are shifted already: labels[:, t] is the token to predict at t, or IGNORED. `weights` is how much that
    prediction counts, float32: the weight of its row, 0 where nothing is predicted.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def micro_batches(
    tokens: Tokens, packs: list[np.ndarray] | Packs, config: TrainerConfig, rank: int, size: int
) -> Iterator[MicroBatch]:
    """Rank `rank`'s share of a step, or of an evaluation: pack i goes to rank i mod `size`.

    Every rank gets the same number of micro-batches, filled up with empty sequences that weigh nothing.
    """
    count, length = config.batch.micro_batch or 1, config.data.sequence_length
    share = -(-len(packs) // size)
    share = -(-share // count) * count
    mine = range(rank, share * size, size)
    for start in range(0, share, count):
        numbers = mine[start : start + count]
        sequences = [_sequence(tokens, packs[i] if i < len(packs) else np.empty(0, np.int64), length) for i in numbers]
        yield MicroBatch(*map(torch.stack, zip(*sequences, strict=True)))


def total_weight(tokens: Tokens, packs: list[np.ndarray]) -> float:
    """Sum of the weights of all packs' labels: what a step's summed loss is divided by."""
    return sum(float((tokens.weights[rows].astype(np.float64) * tokens.labels[rows]).sum()) for rows in packs)


def num_tokens(tokens: Tokens, packs: list[np.ndarray]) -> int:
    """Tokens of all packs together, padding not counted."""
    return sum(int(tokens.lengths[rows].sum()) for rows in packs)


def _sequence(tokens: Tokens, rows: np.ndarray, length: int) -> tuple[torch.Tensor, ...]:
    ids = np.zeros(length, np.int64)
    positions = np.zeros(length, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    weights = np.zeros(length, np.float32)
    at = 0
    for row in rows:
        row_ids, supervised = tokens[row]
        size = len(row_ids)
        ids[at : at + size] = row_ids
        positions[at : at + size] = np.arange(size)
        target = slice(at, at + size - 1)
        labels[target] = np.where(supervised[1:], row_ids[1:], IGNORED)
        weights[target] = np.where(supervised[1:], tokens.weights[row], 0)
        at += size
    # Positions that start again at 0 are what keeps rows apart in attention; the padding is one more row.
    positions[at:] = np.arange(length - at)
    return tuple(torch.from_numpy(array) for array in (ids, positions, labels, weights))
