"""One pass of ours over a file, in a process of its own: reads, checks, renders, tokenises and writes the token store.

    python tests/bench/our_pass.py FILE TOKENIZER FOLDER

Prints JSON.
"""

import json
import shutil
import sys
import time
from pathlib import Path

SEQUENCE_LENGTH = 4096


def main() -> None:
    # Here and not above: worker processes import this file again, as they do the trainer's own light command line.
    from trainer.config import TrainerConfig
    from trainer.encoding import Encoder
    from trainer.model import load_tokenizer
    from trainer.sources import Source
    from trainer.storage import LocalStorage
    from trainer.tokens import build_store, store_key

    rows, folder, target = sys.argv[1:4]
    data = {"train": rows, "sequence_length": SEQUENCE_LENGTH, "long_rows": "truncate"}
    config = TrainerConfig.model_validate({"name": "bench", "model": {"path": folder}, "data": data})
    tokenizer = load_tokenizer(Path(folder), config)
    begin = time.perf_counter()
    sources = [Source(config.data.train[0], 0, config.storage, "data.train")]
    key = store_key(sources, tokenizer, config.data)
    index = build_store(sources, Encoder(tokenizer, config.data), config.data, LocalStorage(target), key, lambda text: None)
    seconds = time.perf_counter() - begin
    (lengths,) = Path(target).glob("*/lengths-*.bin")
    shutil.copy(lengths, f"{target}.lengths")
    shutil.rmtree(target)
    print(json.dumps({"seconds": seconds, "rows": index.num_rows, "tokens": index.num_tokens, "supervised": index.num_supervised}))


if __name__ == "__main__":
    main()
