"""What the data benchmark measures on: the quickstart's tokenizer with two chat templates, and chat rows made from its text.

Words follow one another as in the quickstart's English text, lengths are log-normal, as those of real chat data are, and a
fifth of the rows is short. The same seed gives the same rows.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.model import fetch_model, load_tokenizer
from trainer.quickstart import FOLDER, quickstart

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".cache/bench-data"
SYSTEM = "You are a helpful assistant. Answer briefly, and say so where you do not know."
POOL_WORDS = 2_000_000
RARE = 0.02  # words that no dictionary has: a tokenizer that remembers words is not to know them all
SYLLABLES = [
    "ba",
    "co",
    "di",
    "fu",
    "ge",
    "ha",
    "jo",
    "ki",
    "lu",
    "me",
    "no",
    "pa",
    "qui",
    "re",
    "so",
    "ta",
    "ul",
    "ve",
    "wi",
    "xy",
]
UNMARKED_ANSWER = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED_ANSWER = (
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
)


def tokenizers() -> tuple[Path, Path]:
    """Folders of the quickstart's tokenizer: with its own chat template, and with that template's answers marked."""
    config = quickstart([]).trainer
    tokenizer: Any = load_tokenizer(fetch_model(config, weights=False), config)
    own, marked = WORK / "tokenizer", WORK / "tokenizer-marked"
    tokenizer.save_pretrained(own)
    if UNMARKED_ANSWER not in tokenizer.chat_template:
        raise SystemExit("the quickstart's chat template is another one now; mend UNMARKED_ANSWER in tests/bench/chats.py")
    tokenizer.chat_template = tokenizer.chat_template.replace(UNMARKED_ANSWER, MARKED_ANSWER)
    tokenizer.save_pretrained(marked)
    return own, marked


class Text:
    """Texts of a wanted number of words, cut from a long line of the quickstart's sentences in random order."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        sentences = []
        for path in sorted((ROOT / FOLDER / "text").glob("*.yml")):
            for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
                sentences += [str(turn).split() for turn in conversation]
        self.pool: list[str] = []
        while len(self.pool) < POOL_WORDS:
            self.pool += self.random.choice(sentences)
        for place in self.random.sample(range(POOL_WORDS), int(RARE * POOL_WORDS)):
            self.pool[place] = "".join(self.random.choices(SYLLABLES, k=self.random.randint(2, 5)))

    def words(self, median: float, most: int, spread: float = 0.9) -> str:
        count = min(most, max(1, round(median * self.random.lognormvariate(0, spread))))
        start = self.random.randrange(POOL_WORDS - count)
        return " ".join(self.pool[start : start + count])

    def chat(self) -> list[dict[str, str]]:
        turns = []
        if self.random.random() < 0.2:
            return [_turn("user", self.words(6, 20)), _turn("assistant", self.words(6, 20))]
        if self.random.random() < 0.5:
            turns.append(_turn("system", SYSTEM))
        for _ in range(self.random.choices([1, 2, 3, 4], [60, 20, 12, 8])[0]):
            turns += [_turn("user", self.words(30, 600)), _turn("assistant", self.words(90, 600))]
        return turns

    def short_chat(self) -> list[dict[str, str]]:
        return [_turn("user", self.words(6, 12)), _turn("assistant", self.words(6, 12))]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def lines(text: Text, short: bool = False) -> Iterator[str]:
    """JSON lines without end."""
    while True:
        yield json.dumps({"messages": text.short_chat() if short else text.chat()}, ensure_ascii=False) + "\n"


def write_rows(name: str, count: int | None = None, size: int | None = None, short: bool = False) -> tuple[Path, int]:
    """A file of `count` rows or of `size` bytes, and its number of rows."""
    path = WORK / name
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        for line in lines(Text(seed=1), short):
            written += file.write(line)
            number += 1
            if number == count or (size is not None and written >= size):
                return path, number
    raise AssertionError
