r"""Token ids of texts, and where in them each token lies.

Most of a data pass would go to the tokenizer, which meets the same words again and again. A tokenizer that splits texts
into words by a known regular expression is asked once for each word, and what it said is remembered.

Python's regular expressions know no \p{L}, and another version of Unicode than the tokenizer's may call other characters
letters. So words are only cut out where all characters that decide about them are ASCII. Any other text is kept together
up to the next space between two printable ASCII characters, over which none of the known expressions goes on.
"""

import itertools
import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

MOST_TOKENS = 2**18  # that are remembered; with their words some 50 MB

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER, _FIRST = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_FIRST}{_UPPER}*{_LOWER}+%s|{_FIRST}{_UPPER}+{_LOWER}*%s"
_WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    BYTE_LEVEL,
    rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}",  # GPT-4, Llama 3, GLM 4
    rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}",  # Qwen 2 and 3
    rf"{_ENDINGS}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WHITE_SPACE}",  # Qwen 3.5
    rf"{_CASED % (_ENDINGS + '?', _ENDINGS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITE_SPACE}",  # GPT-4o, gpt-oss
    rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITE_SPACE}",  # Mistral's Tekken
}
# What of each class of characters is ASCII, in the order in which they are replaced.
ASCII = {
    r"[^\s\p{L}\p{N}]": r"[\0-\x08\x0e-\x1f!-/:-@\[-`{-\x7f]",
    r"[^\s\p{L}\p{M}\p{N}]": r"[\0-\x08\x0e-\x1f!-/:-@\[-`{-\x7f]",
    _FIRST: r"[\0-\t\x0b\x0c\x0e-/:-@\[-`{-\x7f]?",
    _UPPER: "[A-Z]",
    _LOWER: "[a-z]",
    r"[\p{L}\p{M}]": "[A-Za-z]",
    r"\p{L}": "[A-Za-z]",
    r"\p{N}": "[0-9]",
    r"\s": r"[\t-\r ]",
    r"\S": r"[^\t-\r ]",
    "(?i:": "(?ai:",
}
_UP_TO_SPACE = r".[^ ]*(?:(?<![!-~]) [^ ]*| (?![!-~])[^ ]*)*"


class Words:
    """Tokenises as `backend.encode_batch` does, without special tokens being added."""

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        tokenizer = json.loads(backend.to_str())
        expression = _expression(tokenizer)
        self.words = _ascii_words(expression) if expression else None
        added = sorted((token["content"] for token in tokenizer["added_tokens"]), key=len, reverse=True)
        self.added = re.compile(f"({'|'.join(map(re.escape, added)) or '(?!)'})")
        self._forget()

    def _forget(self) -> None:
        self.numbers: dict[str, int] = {}  # of each part, by which the arrays are ordered
        self.lengths = self.counts = np.zeros(0, np.int64)  # of each part, in characters and in tokens
        self.ids, self.places = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)  # of all tokens, places within their parts

    def encode(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each text its token ids, int32 [n], and from which to which character each token reaches, int32 [n, 2]."""
        cut = [self._parts(text) for text in texts]
        self._learn(cut)
        numbers = np.fromiter(map(self.numbers.__getitem__, itertools.chain.from_iterable(cut)), np.int64)
        lengths, counts = self.lengths[numbers], self.counts[numbers]
        # The tokens of part p are those from the sum of all counts before it on; they come out one part after the other.
        shift = (np.cumsum(self.counts) - self.counts)[numbers] - (np.cumsum(counts) - counts)
        tokens = np.arange(counts.sum()) + np.repeat(shift, counts)
        ids, places = self.ids[tokens], self.places[tokens] + np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        stops = np.append(0, np.cumsum(counts))[np.cumsum([0, *map(len, cut)])]
        begins = np.cumsum([0, *map(len, texts)])
        return [
            (ids[start:stop], (places[start:stop] - begin).astype(np.int32))
            for start, stop, begin in zip(stops, stops[1:], begins, strict=False)
        ]

    def _parts(self, text: str) -> list[str]:
        """The text in pieces that the tokenizer treats each on its own."""
        if self.words is None:
            return [text]
        parts = []
        for number, piece in enumerate(self.added.split(text)):
            parts += [piece] if number % 2 else self.words.findall(piece)
        return parts

    def _learn(self, cut: list[list[str]]) -> None:
        if len(self.ids) > MOST_TOKENS:
            self._forget()
        new = list(dict.fromkeys(part for part in itertools.chain.from_iterable(cut) if part not in self.numbers))
        found = self.backend.encode_batch(new, add_special_tokens=False)
        ids = itertools.chain.from_iterable(encoding.ids for encoding in found)
        places = itertools.chain.from_iterable(place for encoding in found for place in encoding.offsets)
        self.numbers |= zip(new, itertools.count(len(self.numbers)))
        self.lengths = np.append(self.lengths, np.fromiter(map(len, new), np.int64))
        self.counts = np.append(self.counts, np.fromiter(map(len, found), np.int64))
        self.ids = np.append(self.ids, np.fromiter(ids, np.int32))
        self.places = np.append(self.places, np.fromiter(places, np.int32).reshape(-1, 2), axis=0)


def _expression(tokenizer: dict[str, Any]) -> str | None:
    """By which of EXPRESSIONS a tokenizer.json splits texts into words, None where it does so otherwise or does more than that."""
    normalizer, splitter = tokenizer["normalizer"] or {}, tokenizer["pre_tokenizer"] or {}
    if any(step.get("type", "NFC") != "NFC" for step in normalizer.get("normalizers", [normalizer])):
        return None
    if any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"] for token in tokenizer["added_tokens"]
    ):
        return None
    if tokenizer["model"].get("dropout"):
        return None
    match splitter.get("pretokenizers", [splitter]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return BYTE_LEVEL
        case [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if expression in EXPRESSIONS:
            return expression
    return None


def _ascii_words(expression: str) -> re.Pattern[str]:
    """Finds the expression's words where they are told by ASCII alone, else all up to a space that ends any word."""
    for characters, those in ASCII.items():
        expression = expression.replace(characters, those)
    # Where white space ends at other characters than ASCII, or a word does, these decide, too.
    return re.compile(rf"(?![\t-\r ]*[^\0-\x7f])(?>{expression})(?![^\0-\x7f])|{_UP_TO_SPACE}", re.DOTALL)
