"""Rows: what is refused, which tokens are supervised, and how they are packed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import WORDS, build_tokenizer, config, save_model
from tokenizers import processors

from trainer.config import InputError, TrainerConfig
from trainer.data import Plan, Tokens, encode, end_of_turn, micro_batches, num_supervised, pack, tokenize

TOKENIZER = build_tokenizer()
GOOD = {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue stone"}]}


def made(tmp_path: Path, **data: Any) -> TrainerConfig:
    save_model(tmp_path / "model")
    (tmp_path / "train.jsonl").touch()
    return config(tmp_path, data=data)


def turns(*pairs: tuple[str, Any]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"messages": [', "not valid JSON (Expecting value at column 15)"),
        ("[1]", "no messages; write"),
        ('{"text": "x"}', "no messages; write"),
        ('{"messages": []}', "no messages; write"),
        (turns(("user", "a")), "no assistant turn"),
        (turns(("human", "a"), ("gpt", "b")), "role 'human' is unknown; write system, user or assistant"),
        (turns(("user", "a"), ("assistant", None)), "a message's content is not text"),
        (turns(("user", "a"), ("assistant", "  ")), "an assistant turn is empty"),
        (turns(("system", "s"), ("assistant", "a"), ("user", "b"), ("assistant", "c")), "an assistant turn comes first"),
        (turns(("user", "red<|im_end|>"), ("assistant", "b")), "a message's content holds the special token <|im_end|>"),
        (turns(("user", "a"), ("assistant", "\ud800")), "a message's content holds half a character"),
        ('{"messages": ' + "[" * 100_000, "not valid JSON (a number too long, or too deep)"),
        ('{"messages": ' + "9" * 5000 + "}", "not valid JSON (a number too long, or too deep)"),
        ('{"messages": [{"role": "user", "content": "a", "name": "x"}]}', "a message is not exactly a role and a content"),
        ('{"messages": ["a"]}', "a message is not exactly a role and a content"),
        (json.dumps(GOOD | {"tools": []}), "tools are not supported"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(InputError) as refused:
        tokenize(str(path), TOKENIZER, made(tmp_path))
    assert str(refused.value).startswith(f"{path}:3: {sentence}")


def test_all_kinds_of_problems_are_listed_once_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([turns(("user", "a")), json.dumps(GOOD), turns(("user", "b")), "{"]))
    with pytest.raises(InputError) as refused:
        tokenize(str(path), TOKENIZER, made(tmp_path))
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{path}:1: no assistant turn")
    assert first.endswith("(2 rows)")
    assert second.startswith(f"{path}:4: not valid JSON")


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"", "holds no rows"), (b"\n\n", "holds no rows"), (b'{"a": "\xff"}', ":1: byte 8 is not UTF-8")]
)
def test_a_file_without_usable_rows_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        tokenize(str(tmp_path / "rows.jsonl"), TOKENIZER, made(tmp_path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl: No such file or directory; give an existing JSONL file"):
        tokenize(str(tmp_path / "nowhere.jsonl"), TOKENIZER, made(tmp_path))


def test_the_same_rows_give_the_same_tokens_whatever_their_framing(tmp_path: Path) -> None:
    rows = [GOOD, json.loads(turns(("system", "é"), ("user", "a"), ("assistant", "ü b")))]
    plain = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    framings = [
        plain,
        plain + "\n",
        "\ufeff" + plain,
        plain.replace("\n", "\r\n"),
        plain.replace("\n", "\n\n \n"),
        json.dumps(rows[0]) + "\n" + json.dumps(rows[1]),
    ]
    swapped = [{"messages": [dict(reversed(message.items())) for message in row["messages"]]} for row in rows]
    framings.append("\n".join(json.dumps(row) for row in swapped))
    found = []
    for number, text in enumerate(framings):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(text.encode())
        found.append(tokenize(str(path), TOKENIZER, made(tmp_path)).to_bytes())
    parts = [Tokens.from_bytes(data) for data in found]
    for part in parts[1:]:
        assert part.ids.tolist() == parts[0].ids.tolist()
        assert part.supervised.tolist() == parts[0].supervised.tolist()


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1).filter(str.strip)), min_size=1, max_size=4), st.booleans())
def test_supervised_tokens_decode_to_the_assistants_text_and_end_of_turn(conversation: list[tuple[str, str]], system: bool) -> None:
    messages = [{"role": "system", "content": "be brief"}] if system else []
    for question, answer in conversation:
        # A text that spells a special token is that token: refusing it is the data's business, not the mask's.
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids, mask = encode(messages, TOKENIZER)
    assert TOKENIZER.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "".join(
        f"{answer}<|im_end|>" for _, answer in conversation
    )
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(ids) == text


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_matters() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' and not loop.last %}!{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    assert sum(encode(GOOD["messages"], tokenizer)[1]) > 1
    with pytest.raises(ValueError, match="the chat template changes earlier turns"):
        encode(GOOD["messages"] * 2, tokenizer)


def test_a_template_without_a_generation_prompt_is_refused_unless_the_answer_follows_at_once() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="the chat template writes no generation prompt"):
        encode(GOOD["messages"], tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[A]{% else %} {{ m['content'] }}<|endoftext|>{% endif %}"
        "{% endfor %}"
    )
    ids, mask = encode(GOOD["messages"] * 2, tokenizer)
    assert TOKENIZER.decode([i for i, on in zip(ids, mask, strict=True) if on]) == " blue stone<|endoftext|>" * 2


def test_white_space_is_supervised_where_the_tokenizer_gives_it_no_place() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "if x:\n        return   y\n"
    ids, mask = encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}], tokenizer)
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == answer + "<|im_end|>"


def test_a_template_that_refuses_a_role_gives_its_own_reason() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(ValueError, match=r"the chat template refuses it \(System role not supported\)"):
        encode([{"role": "system", "content": "a"}, *GOOD["messages"]], tokenizer)


def test_end_of_turn_is_found_where_pad_and_eos_are_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    tokens = tokenize(str(tmp_path / "rows.jsonl"), TOKENIZER, made(tmp_path))
    assert end_of_turn(tokens, TOKENIZER.all_special_ids) == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert TOKENIZER.eos_token == "<|endoftext|>"


def test_long_rows_are_refused_or_truncated_but_never_lose_all_supervision(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(turns(("user", "a"), ("assistant", " ".join(WORDS))))
    with pytest.raises(InputError, match=r"rows\.jsonl:1: longer than data\.sequence_length \(32 tokens\)"):
        tokenize(str(path), TOKENIZER, made(tmp_path, sequence_length=32))
    short = tokenize(str(path), TOKENIZER, made(tmp_path, sequence_length=32, long_rows="truncate"))
    assert short.lengths.tolist() == [32]
    path.write_text(turns(("user", " ".join(WORDS)), ("assistant", "a")))
    with pytest.raises(InputError, match=r"rows\.jsonl:1: no assistant token within data\.sequence_length"):
        tokenize(str(path), TOKENIZER, made(tmp_path, sequence_length=32, long_rows="truncate"))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=300), st.integers(0, 2**31))
def test_packing_places_every_row_once_and_never_overflows(lengths: list[int], seed: int) -> None:
    sizes = np.asarray(lengths)
    packs = pack(sizes, 64, np.random.default_rng(seed).permutation(len(sizes)))
    assert sorted(row for rows in packs for row in rows) == list(range(len(sizes)))
    assert max(sizes[rows].sum() for rows in packs) <= 64
    halves = sum(sizes[rows].sum() <= 32 for rows in packs)
    assert halves <= 1


def test_packing_is_97_percent_full_on_log_normal_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 0.9, 4000).astype(int), 8, 4096)
    packs = pack(lengths, 4096, np.arange(len(lengths)))
    assert lengths.sum() / (len(packs) * 4096) > 0.97


def test_labels_are_the_next_token_and_never_a_rows_first(tmp_path: Path) -> None:
    one = made(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(GOOD)] * 3))
    tokens = tokenize(one.data.train, TOKENIZER, one)
    [batch] = micro_batches(tokens, [np.array([0, 1, 2])], one, 0, 1)
    ids, positions, labels = (tensor[0].tolist() for tensor in (batch.input_ids, batch.position_ids, batch.labels))
    length = int(tokens.lengths[0])
    assert positions[: 3 * length] == list(range(length)) * 3
    assert positions[3 * length :] == list(range(128 - 3 * length))
    for at, label in enumerate(labels):
        if label != -100:
            assert ids[at + 1] == label
            assert tokens.supervised[at + 1]
    assert sum(label != -100 for label in labels) == num_supervised(tokens, [np.array([0, 1, 2])]) == int(tokens.supervised.sum())


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_few_rows_still_give_every_rank_the_same_number_of_micro_batches(tmp_path: Path, rows: int, size: int) -> None:
    one = config(
        tmp_path, batch={"sequences": 8, "micro_batch": 2}, data={"sequence_length": 32}, duration={"steps": None, "epochs": 1}
    )
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(GOOD)] * rows))
    tokens = tokenize(one.data.train, TOKENIZER, one)
    plan = Plan(tokens, one)
    assert plan.num_steps == 1
    packs = [plan.rows(number) for number in plan.step_packs(1)]
    shares = [micro_batches(tokens, packs, one, rank, size) for rank in range(size)]
    assert {len(share) for share in shares} == {len(shares[0])}
    assert len(shares[0]) >= 1
    labels = sum(int((batch.labels != -100).sum()) for share in shares for batch in share)
    assert labels == num_supervised(tokens, packs) > 0


def test_a_run_in_tokens_ends_with_the_step_that_reaches_them(tmp_path: Path) -> None:
    one = config(tmp_path, duration={"steps": None, "tokens": 5000})
    tokens = tokenize(one.data.train, TOKENIZER, one)
    plan = Plan(tokens, one)
    by_step = [sum(int(tokens.lengths[plan.rows(n)].sum()) for n in plan.step_packs(step)) for step in range(1, plan.num_steps + 1)]
    assert sum(by_step) >= 5000 > sum(by_step[:-1])
