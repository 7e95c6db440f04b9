"""Token stores made from rows on the spot, as the driver makes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny import build_tokenizer

from trainer.config import TrainerConfig
from trainer.encoding import Encoded, Encoder
from trainer.rows import parse_row
from trainer.sources import Source
from trainer.storage import LocalStorage
from trainer.tokens import COLUMNS, Index, Tokens, build_store, load_tokens, store_key

TOKENIZER = build_tokenizer()


def build(config: TrainerConfig, tokenizer: Any = TOKENIZER) -> tuple[Index, Tokens]:
    """The store of `data.train`, built anew beside the run's folders."""
    sources = [Source(one, number, config.storage, "data.train") for number, one in enumerate(config.data.train)]
    storage = LocalStorage(f"{config.storage.uri}/tokens")
    key = store_key(sources, tokenizer, config.data)
    build_store(sources, Encoder(tokenizer, config.data), config.data, storage, key, lambda text: None)
    return load_tokens(storage, key, Path("unused"))


def data_config(path: Path | str = "unused", **data: Any) -> TrainerConfig:
    values = {"name": "tiny", "model": {"path": "unused"}, "data": {"train": str(path), "sequence_length": 128} | data}
    if isinstance(path, Path):
        values["storage"] = {"uri": str(path.parent / "runs")}
    return TrainerConfig.model_validate(values)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def encode(row: dict[str, Any], tokenizer: Any = TOKENIZER, **data: Any) -> Encoded:
    """One row's tokens; raises what is wrong with it."""
    [found] = Encoder(tokenizer, data_config(**data).data).encode([parse_row(row)])
    if isinstance(found, ValueError):
        raise found
    return found


def learnt(row: dict[str, Any], tokenizer: Any = TOKENIZER, **data: Any) -> str:
    """The text of a row's supervised tokens."""
    encoded = encode(row, tokenizer, **data)
    return tokenizer.decode(encoded.ids[encoded.supervised])


def chat(*turns: tuple[str, Any], **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]} | keys


def tokens_of(ids: np.ndarray, supervised: np.ndarray, lengths: np.ndarray) -> Tokens:
    """Rows of weight 1 that lie end to end in `ids`."""
    starts = np.cumsum([0, *lengths[:-1]])
    labels = np.array([supervised[start + 1 : start + length].sum() for start, length in zip(starts, lengths, strict=True)])
    rows = {name: np.zeros(len(lengths), dtype) for name, dtype in COLUMNS.items()}
    given = {"ids": ids, "supervised": supervised, "starts": starts, "lengths": np.asarray(lengths), "labels": labels}
    return Tokens(**rows | given | {"weights": np.ones(len(lengths), np.float32)})
