"""What a run was given, resolved to content: token stores, commits of the Hub, and inputs.json, which pins them.

The first attempt of a run writes inputs.json by conditional write; later ones use what it says, and refuse with a
sentence where that content is no longer what is there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import InputError, Settings, SourceConfig, TrainerConfig
from trainer.encoding import Encoder
from trainer.model import cache_folder, fetch_model, load_tokenizer
from trainer.packing import Packs, Plan
from trainer.sources import Source
from trainer.storage import Storage, open_storage
from trainer.tokens import Index, Tokens, build_store, contamination, find_index, held_out_rows, load_tokens, store_key


class SourceInputs(Settings):
    revision: str | None
    """Commit of a Hub dataset."""

    files: dict[str, str]
    """Version of each file: a SHA-256, an ETag or a commit."""


class SetInputs(Settings):
    store: str
    """Key of its token store."""

    sha256: str
    """Of its token ids and masks."""

    sources: list[SourceInputs]
    """What each of its sources resolved to."""


class Inputs(Settings):
    """inputs.json."""

    model_revision: str | None
    """Commit of a Hub model."""

    sets: dict[str, SetInputs]
    """`train`, and each evaluation set by its name."""


@dataclass(frozen=True)
class Sets:
    """The rows of a run: what it trains on, what it is evaluated on, and the samples that are asked of each."""

    train: Tokens
    held_out: dict[str, Tokens]
    samples: list[dict[str, Any]]
    end_of_turn: int | None
    files: list[str]  # names of the training rows' files


def read_inputs(storage: Storage) -> Inputs | None:
    try:
        return Inputs.model_validate_json(storage.read("inputs.json"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise InputError(
            f"{storage.uri}/inputs.json is damaged or of another version; "
            "delete it where the data is what this run began with, or set data.version to start a new run"
        ) from None


def resolve(config: TrainerConfig, storage: Storage, say: Callable[[str], None]) -> tuple[Path, Any, Sets]:
    """Model folder, tokenizer and rows, checked and pinned in inputs.json; InputError where any cannot be used."""
    pinned = read_inputs(storage)
    folder = fetch_model(config, weights=False, revision=pinned and pinned.model_revision)
    tokenizer = load_tokenizer(folder, config)
    stores = open_storage(f"{config.storage.uri}/tokens", config.storage)
    sets = {}
    for name, sources in _configured(config).items():
        sets[name] = _resolve_set(name, sources, config, tokenizer, stores, pinned and pinned.sets.get(name), say)
    found = Inputs(model_revision=folder.name if folder.parent.name == "snapshots" else None, sets=sets)
    if pinned is None and not storage.write("inputs.json", found.model_dump_json(indent=1).encode(), if_absent=True):
        pinned = read_inputs(storage)  # another attempt was first
    if pinned is not None:
        _refuse_changed(pinned, found)
        if pinned.sets != found.sets:  # the same tokens in another store, as that of the first attempt may be gone
            storage.write("inputs.json", pinned.model_copy(update={"sets": found.sets}).model_dump_json(indent=1).encode())
    return folder, tokenizer, load_sets(config, found)


def load_sets(config: TrainerConfig, inputs: Inputs) -> Sets:
    """The rows that `inputs` pins, mapped into memory."""
    stores = open_storage(f"{config.storage.uri}/tokens", config.storage)
    indexes: dict[str, Index] = {}
    tokens: dict[str, Tokens] = {}
    for name, one in inputs.sets.items():
        indexes[name], tokens[name] = load_tokens(stores, one.store, cache_folder())
    train = tokens.pop("train")
    samples = [sample for name in tokens for sample in indexes[name].samples]
    if config.data.eval_fraction is not None:
        held_out = held_out_rows(train, config.data.eval_fraction)
        if not held_out.any():
            raise InputError("data.eval_fraction: the training rows are all alike, so none can be held out; give data.eval")
        samples = [sample for sample in indexes["train"].samples if held_out[sample["row"]]]
        tokens = {"eval": train.select(np.flatnonzero(held_out))}
        train = train.select(np.flatnonzero(~held_out))
    return Sets(train, tokens, samples[: config.evaluate.prompts], indexes["train"].end_of_turn, indexes["train"].files)


def _configured(config: TrainerConfig) -> dict[str, list[SourceConfig]]:
    return {"train": config.data.train} | (config.data.eval or {})


def _resolve_set(
    name: str,
    configs: list[SourceConfig],
    config: TrainerConfig,
    tokenizer: Any,
    stores: Storage,
    pinned: SetInputs | None,
    say: Callable[[str], None],
) -> SetInputs:
    """One data set's store, built where it is not there yet; says what became of its rows."""
    revisions = [source.revision for source in pinned.sources] if pinned else [None] * len(configs)
    key = "data.train" if name == "train" else f"data.eval.{name}" if name != "eval" else "data.eval"
    sources = [
        Source(one, number, config.storage, key, revision)
        for number, (one, revision) in enumerate(zip(configs, revisions, strict=True))
    ]
    store = store_key(sources, tokenizer, config.data)
    index = find_index(stores, store) or build_store(sources, Encoder(tokenizer, config.data), config.data, stores, store, say)
    say(describe(name, index, config))
    versions = [
        SourceInputs(revision=source.revision, files={file.name: file.version for file in source.files}) for source in sources
    ]
    return SetInputs(store=store, sha256=index.sha256, sources=versions)


def describe(name: str, index: Index, config: TrainerConfig) -> str:
    """What became of a data set's rows: a line, and one more for everything that not all of them share."""
    files = index.files[0] if len(index.files) == 1 else f"{len(index.files):,} files"
    lines = [f"{name}: {files}: {index.num_rows:,} rows, {index.num_tokens:,} tokens, {index.num_supervised:,} of them supervised"]
    for count, what in (
        (index.num_truncated, f"rows cut to data.sequence_length ({config.data.sequence_length} tokens)"),
        (index.num_split, f"rows split at data.sequence_length ({config.data.sequence_length} tokens)"),
        (index.num_dropped, "pieces of them left out, with nothing to learn from"),
    ):
        if count:
            lines.append(f"  {count:,} {what}")
    if not index.num_ended:
        lines.append("  no row's learnt part ends with a special token, so no end-of-turn is learnt; mend the chat template")
    lines += [f"  {count:,} rows left out: {reason} (first: {index.places[reason]})" for reason, count in index.skipped.items()]
    return "\n".join(lines)


def describe_plan(sets: Sets, plan: Plan) -> str:
    """How the first epoch packs, how many steps there are, and what the sets share."""
    packs = plan.epoch_packs(0)[0]
    lines = [f"packing: {len(packs):,} sequences, {fullness(packs, sets.train, plan.config):.1%} full; {plan.num_steps:,} steps"]
    for name, tokens in sets.held_out.items():
        rows, prompts = contamination(sets.train, tokens)
        if rows or prompts:
            lines.append(
                f"{name}: {rows:,} of its {len(tokens):,} rows are training rows too, {prompts:,} have a prompt that is one of theirs"
            )
    return "\n".join(lines)


def fullness(packs: Packs, tokens: Tokens, config: TrainerConfig) -> float:
    """Share of the packed sequences' places that hold a token."""
    return float(tokens.lengths[packs.rows].sum() / max(1, len(packs) * config.data.sequence_length))


def _refuse_changed(pinned: Inputs, found: Inputs) -> None:
    """InputError where a set's tokens are not those that the run began with."""
    for name, one in found.sets.items():
        before = pinned.sets.get(name)
        if before is None or before.sha256 == one.sha256:
            continue
        old, new = ({f: v for source in part.sources for f, v in source.files.items()} for part in (before, one))
        changed = next((file for file in [*new, *old] if old.get(file) != new.get(file)), None)
        what = changed or "the tokenizer or its chat template"
        raise InputError(f"data.{name}: {what} has changed since this run began; set data.version to start a new run")
