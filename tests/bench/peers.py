"""What TRL and datasets make of the same rows, in their own venv (tests/bench/peers.txt). Each task prints JSON.

python tests/bench/peers.py prepare FILE TOKENIZER PROCESSES    time of TRL's preparation, with its assistant-only loss
python tests/bench/peers.py map FILE TOKENIZER PROCESSES        time of datasets.map with apply_chat_template alone
python tests/bench/peers.py pack LENGTHS:CAPACITY ...           TRL's packing (bfd) of rows of these lengths
python tests/bench/peers.py encode FILE TOKENIZER [TEMPLATE]    TRL's ids and labels of each row
python tests/bench/peers.py versions
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SEQUENCE_LENGTH = 4096


def trainer(rows: Any, tokenizer: Any, processes: int | None = None, **settings: Any) -> tuple[Any, float]:
    """TRL's trainer over the rows, and the seconds that it took to prepare them."""
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    seconds = 0.0

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
            nonlocal seconds
            begin = time.perf_counter()
            found = super()._prepare_dataset(*arguments, **options)
            seconds = time.perf_counter() - begin
            return found

    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    tokenizer.pad_token = tokenizer.pad_token or "<|endoftext|>"
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_length=SEQUENCE_LENGTH,
            dataset_num_proc=processes,
            report_to=[],
            use_cpu=True,
            bf16=False,
            **settings,
        )
        return Timed(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer), seconds


def load(path: str) -> Any:
    return datasets.load_dataset("json", data_files=path, split="train")


def workers(processes: str) -> int | None:
    """What datasets calls num_proc; at 1 it would start a process and send every row to it."""
    return None if processes == "1" else int(processes)


def prepare(path: str, folder: str, processes: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = time.perf_counter()
    rows = load(path)
    loading = time.perf_counter() - begin
    found, seconds = trainer(rows, tokenizer, workers(processes), assistant_only_loss=True)
    columns = found.train_dataset.with_format("arrow")[:]
    tokens = sum(len(chunk.flatten()) for chunk in columns["input_ids"].chunks)
    supervised = sum(int((chunk.flatten().to_numpy() != -100).sum()) for chunk in columns["labels"].chunks)
    return {"seconds": loading + seconds, "rows": len(found.train_dataset), "tokens": tokens, "supervised": supervised}


def map_alone(path: str, folder: str, processes: str) -> dict[str, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    begin = time.perf_counter()

    def render(row: dict[str, Any]) -> Any:
        return tokenizer.apply_chat_template(row["messages"], return_dict=True)

    found = load(path).map(render, num_proc=workers(processes))
    return {"seconds": time.perf_counter() - begin, "rows": len(found)}


def pack(*sets: str) -> list[dict[str, float]]:
    """Of each set, given as FILE:CAPACITY, the number of packed sequences and the seconds."""
    from trl import pack_dataset  # pyright: ignore[reportMissingImports]

    results = []
    for name, capacity in (one.rsplit(":", 1) for one in sets):
        lengths = np.minimum(np.fromfile(name, np.int32), int(capacity))
        rows = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
        begin = time.perf_counter()
        found = pack_dataset(rows, seq_length=int(capacity), strategy="bfd")
        results.append({"packs": len(found), "seconds": time.perf_counter() - begin})
    return results


def encode(path: str) -> dict[str, Any]:
    """Ids and labels of each row of each job, or TRL's refusal. A job has a tokenizer, a template or none, and rows."""
    found: dict[str, Any] = {}
    for name, job in json.loads(Path(path).read_text(encoding="utf-8")).items():
        tokenizer: Any = AutoTokenizer.from_pretrained(job["tokenizer"])
        tokenizer.chat_template = job["template"] or tokenizer.chat_template
        try:
            chat = "messages" in job["rows"][0]
            made, _ = trainer(datasets.Dataset.from_list(job["rows"]), tokenizer, assistant_only_loss=chat)
            found[name] = [{"ids": row["input_ids"], "labels": row["labels"]} for row in made.train_dataset]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def templates() -> dict[str, list[str]]:
    """TRL's chat templates that have a form with generation markers: [as the model has it, with markers]."""
    import trl  # pyright: ignore[reportMissingImports]

    folder = Path(str(trl.__file__)).parent / "chat_templates"
    pairs = ((path, path.with_name(path.name.replace("_training", ""))) for path in sorted(folder.glob("*_training.jinja")))
    return {
        own.stem: [own.read_text(encoding="utf-8"), marked.read_text(encoding="utf-8")] for marked, own in pairs if own.exists()
    }


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("trl", "datasets", "transformers", "tokenizers", "torch")}


if __name__ == "__main__":
    # Else a second measurement would find the first one's result on disk.
    tasks = {"prepare": prepare, "map": map_alone, "pack": pack, "encode": encode, "versions": versions, "templates": templates}
    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)  # pyright: ignore[reportAttributeAccessIssue]
        datasets.disable_progress_bars()
        result = tasks[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result))
