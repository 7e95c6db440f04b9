"""What is remembered of words is what the tokenizer would say of each text itself."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from trainer import words
from trainer.words import BYTE_LEVEL, EXPRESSIONS, Words

# Where words end by some expression, or by some version of Unicode: white space of all kinds, marks, letters that are none.
KINDS = (
    "a the ABC aBc ' 's S 'LL 're 1 23 4567 . ! ( / // _ ~ \x00 \x1c \x7f \t \x0b \r \n é e\u0301 \u0301 ß \u017f \u212a İ ﬁ ǅ ʰ ª ² \u0663 "
    "字 漢字 🎉 \x85 \u00a0 \u200b \u2028 \u3000 \ufeff € <|im_start|> <|im_end|> <| |>"
)
PIECES = KINDS.split(" ")
texts = st.lists(st.sampled_from([*PIECES, " ", "  ", "   ", "\n\n", " word"]), max_size=30).map("".join)


@functools.cache
def tokenizer(expression: str | None, composed: bool = False) -> Tokenizer:
    """A byte-level BPE of the pieces that splits by an expression, None: by the one that ByteLevel has itself."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)  # pyright: ignore[reportAttributeAccessIssue]
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, made.pre_tokenizer])  # pyright: ignore[reportAttributeAccessIssue]
    if composed:
        made.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    made.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore[reportAttributeAccessIssue]
    corpus = [f"{first}{between}{second}" for first in PIECES for between in ("", " ", "\n") for second in PIECES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    made.train_from_iterator(corpus, trainer)
    return made


def assert_same(cut: Words, batch: list[str]) -> None:
    expected = cut.backend.encode_batch(batch, add_special_tokens=False)
    for (ids, places), encoding in zip(cut.encode(batch), expected, strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == encoding.ids
        assert places.tolist() == [list(place) for place in encoding.offsets]


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("expression", [None, *sorted(EXPRESSIONS)])
@given(batch=st.lists(texts, max_size=5))
def test_tokens_and_their_places_are_those_of_the_whole_text(expression: str | None, composed: bool, batch: list[str]) -> None:
    cut = Words(tokenizer(expression, composed))
    assert cut.words is not None
    assert_same(cut, batch)
    assert_same(cut, batch)  # now remembered


def test_a_word_is_asked_for_once_and_remembered_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_TOKENS", 20)
    cut = Words(tokenizer(None))
    assert_same(cut, ["the cold, cold river\n"] * 3)
    assert sorted(cut.numbers) == sorted(["the", " cold", ",", " river", "\n"])
    for number in range(100):
        assert_same(cut, [f"{number} rivers", "the cold"])
        assert len(cut.ids) < 40


def changed(**settings: bool) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer(None).to_str())
    made.add_special_tokens([AddedToken("<mask>", **settings)])
    return made


@pytest.mark.parametrize(
    "other",
    [
        tokenizer(r"\w+|\W+"),
        tokenizer(BYTE_LEVEL.removesuffix(r"|\s+")),
        changed(rstrip=True),
        changed(single_word=True),
        changed(normalized=True),
    ],
)
@given(batch=st.lists(texts, max_size=5))
def test_a_tokenizer_that_splits_otherwise_gets_whole_texts(other: Tokenizer, batch: list[str]) -> None:
    cut = Words(other)
    assert cut.words is None
    assert_same(cut, batch)
