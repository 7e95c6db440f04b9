"""From rows of chat messages to the micro-batches of a step.

It owns the row format, the loss mask, packing and the order of rows. Everything after tokenising is a pure function
of (lengths, seed, epoch), so a step's content needs no state to be saved and is the same at any number of workers.
"""

import bisect
import functools
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from trainer.config import InputError, TrainerConfig, refusing
from trainer.storage import open_storage

IGNORED = -100  # torch's cross entropy skips this label
ROLES = ("system", "user", "assistant")
PACKING_WINDOW = 2048  # rows among which packing looks for the best fit; part of ORDER_VERSION


@dataclass(frozen=True)
class Tokens:
    """Tokenised rows, end to end: `ids` int32 [n], `supervised` bool [n], row r at offsets[r]:offsets[r + 1]."""

    ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, ids=self.ids, supervised=self.supervised, offsets=self.offsets)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Tokens":
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return cls(**arrays)


# ---- rows ----


@dataclass
class Problems:
    """What is wrong with a data set: each reason with the first place it was met and the number of rows."""

    places: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, reason: str) -> None:
        self.places.setdefault(reason, place)
        self.counts[reason] += 1

    def raise_any(self) -> None:
        """Raises InputError with the first place of each reason, if there is any."""
        if self.counts:
            lines = (f"{self.places[reason]}: {reason}" + (f" ({n} rows)" if n > 1 else "") for reason, n in self.counts.items())
            raise InputError("\n".join(lines))


def tokenize(path: str, tokenizer: Any, config: TrainerConfig) -> Tokens:
    """Reads, checks, renders and tokenises all rows of `path`; InputError lists every kind of problem in it."""
    problems = Problems()
    ids: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    limit = config.data.sequence_length
    for place, line in _lines(path, config):
        try:
            messages = parse_row(line)
            row_ids, row_mask = encode(messages, tokenizer)
        except ValueError as error:
            problems.add(place, str(error))
            continue
        if len(row_ids) > limit and config.data.long_rows == "error":
            problems.add(place, f"longer than data.sequence_length ({limit} tokens); raise it, or set data.long_rows to truncate")
        elif not any(row_mask[1:limit]):
            problems.add(place, f"no assistant token within data.sequence_length ({limit}); shorten the prompt or raise it")
        ids.append(np.asarray(row_ids[:limit], np.int32))
        supervised.append(np.asarray(row_mask[:limit], bool))
    problems.raise_any()
    if not ids:
        raise InputError(f"{path}: holds no rows; write one JSON object with messages a line")
    offsets = np.cumsum([0, *(len(row) for row in ids)], dtype=np.int64)
    return Tokens(np.concatenate(ids), np.concatenate(supervised), offsets)


def _lines(path: str, config: TrainerConfig) -> Iterator[tuple[str, str]]:
    """(file:line, text) of each line that is not blank."""
    try:
        with _open(path, config) as stream:
            for number, raw in enumerate(stream, start=1):
                place = f"{path}:{number}"
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise InputError(f"{place}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
                if text:
                    yield place, text
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give an existing JSONL file") from None


def _open(path: str, config: TrainerConfig) -> IO[bytes]:
    if not path.startswith("s3://"):
        return Path(path).open("rb")
    folder, _, name = path.rpartition("/")
    with refusing(f"{path}: cannot be read", "give an object that this run's credentials may read"):
        try:
            return open_storage(folder, config.storage).open(name)
        except FileNotFoundError:
            raise InputError(f"{path}: no such object; give an existing JSONL file") from None


def parse_row(line: str) -> list[dict[str, str]]:
    """The messages of one JSONL row; ValueError says what is wrong with it and what to write."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON (a number too long, or too deep); write one JSON object a line") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('no messages; write {"messages": [{"role": "user", "content": "..."}, ...]}')
    if "tools" in row:
        raise ValueError("tools are not supported; remove that key")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError("a message is not exactly a role and a content; write those two keys")
        if message["role"] not in ROLES:
            raise ValueError(f"role {message['role']!r} is unknown; write {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        if not isinstance(message["content"], str):
            raise ValueError("a message's content is not text; write a string")
        if not message["content"].isascii() and any("\ud800" <= c <= "\udfff" for c in message["content"]):
            raise ValueError("a message's content holds half a character (a lone surrogate); write it whole")
    if next((message["role"] for message in messages if message["role"] != "system"), "user") == "assistant":
        raise ValueError("an assistant turn comes first, an answer to nothing; begin with a user turn")
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no assistant turn, so nothing to learn from; add one or remove the row")
    if not all(answer.strip() for answer in answers):
        raise ValueError("an assistant turn is empty; write its text or remove it")
    return messages


def encode(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and which of them are supervised: assistant turns with their end-of-turn.

    A turn's place in the text is proved by the prefix property: the conversation before it, with the generation
    prompt, and the conversation up to it must both begin the whole text. Where a template rewrites earlier turns the
    proof fails, and so does the row (ValueError).
    """
    for token in tokenizer.all_special_tokens:
        if any(token in message["content"] for message in messages):
            raise ValueError(f"a message's content holds the special token {token}; remove it, or write it otherwise")
    text = _render(tokenizer, messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], prompt=True)
        through = _render(tokenizer, messages[: index + 1], prompt=False)
        if not (text.startswith(before) and text.startswith(through) and len(before) < len(through)):
            raise ValueError("the chat template changes earlier turns, so assistant tokens cannot be told; split the row by turn")
        # Some templates need no generation prompt, as the user's turn ends with it; then the answer itself must follow.
        if before == _render(tokenizer, messages[:index], prompt=False) and not through[len(before) :].lstrip().startswith(
            message["content"].strip()
        ):
            raise ValueError(
                "the chat template writes no generation prompt, so an answer's start cannot be told; use one that does"
            )
        spans.append((len(before), len(through)))
    # The template writes its own special tokens, a BOS among them: adding them again would double them.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids)
    mask = [False] * len(encoded["input_ids"])
    for start, end in spans:
        offsets = encoded["offset_mapping"]
        inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= end and b > a]
        ends = [i for i in inside if encoded["input_ids"][i] in special]
        # White space that the template puts after the end-of-turn is not the model's to write.
        last = ends[-1] if ends and not text[offsets[ends[-1]][1] : end].strip() else inside[-1]
        # All between the first and the last: some tokenizers give white space an empty place in the text.
        mask[inside[0] : last + 1] = [True] * (last + 1 - inside[0])
    return encoded["input_ids"], mask


def _render(tokenizer: Any, messages: list[dict[str, str]], prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it ({error}); change the row's roles, or mend the template") from None
    except TypeError as error:
        raise ValueError(f"the chat template fails on it ({error}); mend the template") from None


def end_of_turn(tokens: Tokens, special_ids: list[int]) -> int | None:
    """The special token that most rows' supervised part ends with, or None."""
    last = [int(np.flatnonzero(tokens.supervised[a:b])[-1] + a) for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
    token, count = Counter(int(tokens.ids[i]) for i in last).most_common(1)[0]
    return token if token in special_ids and 2 * count > len(last) else None


def prompts(path: str, config: TrainerConfig, count: int) -> list[dict[str, Any]]:
    """The first `count` rows as (messages before the last assistant turn, that turn): what a sample asks for."""
    found: list[dict[str, Any]] = []
    for _, line in _lines(path, config):
        if len(found) == count:
            break
        messages = parse_row(line)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        found.append({"messages": messages[:last], "reference": messages[last]["content"]})
    return found


# ---- order and packing ----


def pack(lengths: np.ndarray, capacity: int, order: np.ndarray) -> list[np.ndarray]:
    """Row numbers of each packed sequence: best fit, longest row first, over consecutive windows of `order`."""
    packs: list[np.ndarray] = []
    for start in range(0, len(order), PACKING_WINDOW):
        window = order[start : start + PACKING_WINDOW]
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, number of the pack), sorted
        for row in window[np.argsort(-lengths[window], kind="stable")]:
            length = int(lengths[row])
            at = bisect.bisect_left(room, (length, -1))
            left, number = room.pop(at) if at < len(room) else (capacity, len(rows))
            if number == len(rows):
                rows.append([])
            rows[number].append(int(row))
            bisect.insort(room, (left - length, number))
        packs.extend(np.asarray(row_numbers) for row_numbers in rows)
    return packs


class Plan:
    """Which rows each step trains on: an endless line of packs, epoch after epoch, cut into steps."""

    def __init__(self, tokens: Tokens, config: TrainerConfig):
        self.lengths = tokens.lengths
        self.config = config
        self.first_pack = [0]  # global number of each epoch's first pack
        self.epoch_packs = functools.lru_cache(maxsize=2)(self._epoch_packs)
        self.num_packs = self._count_packs()
        self.num_steps = -(-self.num_packs // config.batch.sequences)

    def _epoch_packs(self, epoch: int) -> list[np.ndarray]:
        random = np.random.Generator(np.random.Philox(key=[self.config.seed, epoch]))
        packs = pack(self.lengths, self.config.data.sequence_length, random.permutation(len(self.lengths)))
        # Best fit leaves the fullest packs in front: shuffle, so that a step's rows have no bias of length.
        return [packs[i] for i in random.permutation(len(packs))]

    def rows(self, number: int) -> np.ndarray:
        """Row numbers of pack `number`, counted from the run's start."""
        while self.first_pack[-1] <= number:
            self.first_pack.append(self.first_pack[-1] + len(self.epoch_packs(len(self.first_pack) - 1)))
        epoch = bisect.bisect_right(self.first_pack, number) - 1
        return self.epoch_packs(epoch)[number - self.first_pack[epoch]]

    def step_packs(self, step: int) -> range:
        """Numbers of the packs of `step`, which counts from 1; the last step may have fewer."""
        size = self.config.batch.sequences
        return range((step - 1) * size, min(step * size, self.num_packs))

    def _count_packs(self) -> int:
        duration = self.config.duration
        if duration.steps is not None:
            return duration.steps * self.config.batch.sequences
        if duration.epochs is not None:
            return sum(len(self.epoch_packs(epoch)) for epoch in range(duration.epochs))
        size, seen, number = self.config.batch.sequences, 0, 0
        while seen < (duration.tokens or 0):
            seen += sum(int(self.lengths[self.rows(number + i)].sum()) for i in range(size))
            number += size
        return number


def epoch_zero(tokens: Tokens, config: TrainerConfig) -> list[np.ndarray]:
    """Packs of every row once, in file order: what an evaluation runs over."""
    return pack(tokens.lengths, config.data.sequence_length, np.arange(len(tokens.lengths)))


# ---- micro-batches ----


@dataclass(frozen=True)
class MicroBatch:
    """Sequences for one forward pass, each int64 [micro_batch, sequence_length].

    `labels` are shifted already: labels[:, t] is the token to predict at t, or IGNORED.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor


def micro_batches(tokens: Tokens, packs: list[np.ndarray], config: TrainerConfig, rank: int, size: int) -> list[MicroBatch]:
    """Rank `rank`'s share of a step: pack i goes to rank i mod `size`.

    Every rank gets the same number of micro-batches, filled up with empty sequences that weigh nothing.
    """
    count, length = config.batch.micro_batch, config.data.sequence_length
    share = -(-len(packs) // size)
    share = -(-share // count) * count
    mine = [packs[i] if i < len(packs) else np.empty(0, int) for i in range(rank, share * size, size)]
    sequences = [_sequence(tokens, rows, length) for rows in mine]
    return [MicroBatch(*map(torch.stack, zip(*sequences[i : i + count], strict=True))) for i in range(0, share, count)]


def num_supervised(tokens: Tokens, packs: list[np.ndarray]) -> int:
    """Labels of all packs together: a row's first token is never a target."""
    return sum(int(tokens.supervised[tokens.offsets[row] + 1 : tokens.offsets[row + 1]].sum()) for rows in packs for row in rows)


def num_tokens(tokens: Tokens, packs: list[np.ndarray]) -> int:
    """Tokens of all packs together, padding not counted."""
    return sum(int(tokens.lengths[rows].sum()) for rows in packs)


def _sequence(tokens: Tokens, rows: np.ndarray, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = np.zeros(length, np.int64)
    positions = np.zeros(length, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    at = 0
    for row in rows:
        start, stop = tokens.offsets[row], tokens.offsets[row + 1]
        size = int(stop - start)
        ids[at : at + size] = tokens.ids[start:stop]
        positions[at : at + size] = np.arange(size)
        target = slice(at, at + size - 1)
        labels[target] = np.where(tokens.supervised[start + 1 : stop], tokens.ids[start + 1 : stop], IGNORED)
        at += size
    # Positions that start again at 0 are what keeps rows apart in attention; the padding is one more row.
    positions[at:] = np.arange(length - at)
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(labels)
