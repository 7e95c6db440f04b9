"""Which tokens of a row are supervised, and which rows are refused because that cannot be told."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import chat, encode, learnt
from tiny import CHATML, build_tokenizer
from tokenizers import processors

from trainer.config import InputError
from trainer.model import load_tokenizer

GOOD = chat(("user", "red"), ("assistant", "blue stone"))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "strict": True}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": True, "b": [None, "x"]}}}]}
WITH_TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}\
{% for call in m.tool_calls or [] %}{{ '[' + call.function.name + ' ' + call.function.arguments | tojson + ']' }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


TIGHT = MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}")
# Markers around the right number of wrong places.
IN_USER = MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
IN_MACRO = "{% macro turn(m) %}" + MARKED.replace("{% for m in messages %}", "").replace(
    "{% endfor %}", "{% endmacro %}", 1
).replace("{% endmacro %}", "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}")
OVER_HEADER = """{% for m in messages %}{% if m.role == 'assistant' %}\
{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>' }}{% endgeneration %}{% else %}\
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
OVER_NEXT = OVER_HEADER.replace(
    "m.content + '<|im_end|>' }}{% endg", "m.content + '<|im_end|><|im_start|>user\n' }}{% endg"
).replace("'<|im_start|>' + m.role + '\n' + m.content", "('' if loop.index > 1 else '<|im_start|>user\n') + m.content")
IN_PIECES = MARKED.replace(
    "m.content + '", "m.content }}{% endgeneration %}{% generation %}{% endgeneration %}{% generation %}{{ '", 1
)
# As gpt-oss has it: thought and answer are two messages of one turn, both of them opened anew, and so is a call.
CHANNELS = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% if m.thinking %}\
{{ '<|im_start|>assistant<think>' + m.thinking + '<|im_end|>' }}{% endif %}{% for call in m.tool_calls or [] %}\
{{ '<|im_start|>assistant to=' + call.function.name + ' ' + call.function.arguments | tojson + '<|im_end|>' }}{% else %}\
{{ '<|im_start|>assistant<answer>' + m.content + '<|im_end|>' }}{% endfor %}{% endgeneration %}{% else %}\
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
PYTHON_CALLS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}\
{{ '[' + call.function.name + '(' }}{% for name, value in call.function.arguments.items() %}{{ name + '=' }}\
{{ ("'" + value | replace("'", "\\\\'") | replace("\\n", "\\\\n") + "'") if value is string else value | string }}{{ ', ' if not loop.last }}\
{% endfor %}{{ ')]' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QUIET = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}\
{{ '[' + c.function.name + ']' + c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"""


def with_template(template: str) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


# Characters of several tokens, at the end above all, are where a mask goes wrong.
endings = st.text(st.sampled_from("é🎉①字ﬁ"), max_size=2)
texts = st.builds(str.__add__, st.text(st.characters(codec="utf-8"), min_size=1), endings).filter(lambda text: text == text.strip())
conversations = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@pytest.mark.parametrize("template", [CHATML, MARKED, TIGHT, WITH_TOOLS])
@given(conversation=conversations, system=st.booleans())
def test_supervised_tokens_decode_to_the_assistants_text_and_end_of_turn(
    template: str, conversation: list[tuple[str, str]], system: bool
) -> None:
    turns = [("system", "be brief")] if system else []
    for question, answer in conversation:
        turns += [("user", question), ("assistant", answer)]
    tokenizer = with_template(template)
    encoded = encode(chat(*turns), tokenizer)
    assert tokenizer.decode(encoded.ids[encoded.supervised]) == "".join(f"{answer}<|im_end|>" for _, answer in conversation)
    assert tokenizer.decode(encoded.ids) == tokenizer.apply_chat_template(chat(*turns)["messages"], tokenize=False)


@given(conversation=conversations, roles=st.sets(st.sampled_from(["system", "user", "assistant"]), min_size=1))
def test_each_role_that_is_chosen_is_supervised_and_no_other(conversation: list[tuple[str, str]], roles: set[str]) -> None:
    turns = [("system", "be brief")]
    for question, answer in conversation:
        turns += [("user", question), ("assistant", answer)]
    expected = "".join(f"{text}<|im_end|>" for role, text in turns if role in roles)
    assert learnt(chat(*turns), supervised_roles=sorted(roles)) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_last_turn_and_turns_of_weight_1_are_learnt_where_asked(template: str) -> None:
    turns = chat(("user", "a"), ("assistant", "red"), ("user", "b"), ("assistant", "blue"), ("user", "c"), ("assistant", "green"))
    tokenizer = with_template(template)
    assert learnt(turns, tokenizer, last_turn_only=True) == "green<|im_end|>"
    turns["messages"][3]["weight"] = 0
    assert learnt(turns, tokenizer) == "red<|im_end|>green<|im_end|>"
    turns["messages"][5]["weight"] = 0
    assert learnt(turns, tokenizer, last_turn_only=True) == "red<|im_end|>"
    with pytest.raises(ValueError, match="no turn of assistant to learn from"):
        learnt({"messages": [m | {"weight": 0} for m in turns["messages"]]}, tokenizer)
    with pytest.raises(ValueError, match="no turn of assistant to learn from"):
        learnt(chat(("user", "a")), tokenizer)


def test_a_completion_and_the_end_of_the_text_are_learnt_and_its_prompt_is_not() -> None:
    assert learnt({"prompt": "red:", "completion": " blue"}) == " blue<|endoftext|>"
    messages = chat(("user", "a"), ("assistant", "red"), ("user", "b"), ("assistant", "blue"))["messages"]
    assert learnt({"prompt": messages[:3], "completion": messages[3:]}) == "blue<|im_end|>"


def test_a_plain_text_is_learnt_whole_with_the_end_of_the_text() -> None:
    assert learnt({"text": "red blue"}) == "red blue<|endoftext|>"
    assert learnt({"text": "red blue<|endoftext|>"}) == "red blue<|endoftext|>"


def with_bos() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    one = ("<|im_start|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[one])
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ '<|im_end|>' }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize(
    "row",
    [
        {"text": "red"},
        {"text": "<|im_start|>red"},
        {"prompt": "red", "completion": " blue"},
        chat(("user", "a"), ("assistant", "red")),
    ],
)
def test_a_tokenizer_that_begins_with_bos_gets_exactly_one(row: dict[str, Any]) -> None:
    tokenizer = with_bos()
    encoded = encode(row, tokenizer)
    assert (encoded.ids == tokenizer.bos_token_id).sum() == 1
    assert encoded.ids[0] == tokenizer.bos_token_id


def test_the_end_of_turn_is_supervised_where_it_is_the_padding_token_too() -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    assert learnt(GOOD, tokenizer) == "blue stone<|im_end|>"


def test_a_tokenizer_file_that_truncates_and_pads_does_not_cut_rows() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert encode(GOOD, tokenizer).ids.tolist() == encode(GOOD).ids.tolist()


def test_white_space_is_supervised_where_the_tokenizer_gives_it_no_place() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "if x:\n        return   y\n"
    assert learnt(chat(("user", "a"), ("assistant", answer)), tokenizer) == answer + "<|im_end|>"


def test_leading_white_space_is_supervised_and_joins_are_seen_where_offsets_leave_white_space_out() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert learnt({"prompt": "red", "completion": "  blue"}, tokenizer) == learnt({"prompt": "red", "completion": "  blue"})
    assert learnt(chat(("user", "a"), ("assistant", "  red")), tokenizer) == "  red<|im_end|>"
    tokenizer.add_tokens(["  "])
    with pytest.raises(ValueError, match="a token joins a supervised text"):
        encode({"prompt": "red ", "completion": " blue"}, tokenizer)


def test_an_end_of_turn_right_after_a_marker_is_learnt_and_the_next_turns_start_is_not() -> None:
    assert learnt({"messages": GOOD["messages"] * 2}, with_template(TIGHT)) == "blue stone<|im_end|>" * 2
    endless = TIGHT.replace("<|im_end|>", "").replace("{{ '\n' }}{% endfor %}", "{% endfor %}")
    assert learnt({"messages": GOOD["messages"] * 2}, with_template(endless)) == "blue stone" * 2


def test_markers_around_the_answers_own_header_have_it_learnt_as_it_is_by_trl() -> None:
    assert learnt(GOOD, with_template(OVER_HEADER)) == "<|im_start|>assistant\nblue stone<|im_end|>"


@pytest.mark.parametrize(
    "template", [IN_PIECES, IN_PIECES.replace("{% endfor %}", "{% generation %}{% endgeneration %}{% endfor %}")]
)
def test_a_generation_marked_in_pieces_is_one(template: str) -> None:
    assert learnt({"messages": GOOD["messages"] * 2}, with_template(template)) == "blue stone<|im_end|>" * 2


@pytest.mark.parametrize("template", [CHANNELS, CHANNELS.replace("{% generation %}", "").replace("{% endgeneration %}", "")])
def test_an_answer_of_several_messages_is_learnt_whole(template: str) -> None:
    opening = "<|im_start|>assistant"
    head = opening if "{% generation %}" in template else ""  # by proof, what the generation prompt writes is not learnt
    thought = {"messages": [GOOD["messages"][0], {"role": "assistant", "thinking": "is it a?", "content": "a"}]}
    expected = f"{head}<think>is it a?<|im_end|>{opening}<answer>a<|im_end|>"
    assert learnt(thought, with_template(template)) == expected
    call = CALL | {"tool_calls": CALL["tool_calls"] * 2}
    one = ' to=add {"a": true, "b": [null, "x"]}<|im_end|>'
    assert learnt({"messages": [GOOD["messages"][0], call]}, with_template(template)) == head + one + opening + one


def test_calls_may_be_written_in_python() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": True, "b": "it's\nred"}}}]}
    row = {"messages": [GOOD["messages"][0], call]}
    assert learnt(row, with_template(PYTHON_CALLS)) == "[add(a=True, b='it\\'s\\nred')]<|im_end|>"
    with pytest.raises(ValueError, match="as Python prints them"):
        encode(row | {"tools": TOOLS}, with_template("{{ tools }}" + PYTHON_CALLS))


# ---- what cannot be told is refused ----


@pytest.mark.parametrize("template", [IN_USER, IN_MACRO, OVER_NEXT])
def test_markers_that_do_not_enclose_the_answers_alone_are_refused(template: str) -> None:
    for row in (GOOD, chat(("user", "is it a or b?"), ("assistant", "a"))):
        with pytest.raises(ValueError, match="the chat template's generation markers"):
            encode(row, with_template(template))


def test_markers_around_a_part_of_a_turn_are_refused() -> None:
    tokenizer = with_template(MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{{ m.content[2:] + '<|im_end|>' }}{% endg"))
    with pytest.raises(ValueError, match="generation markers enclose other text than the answers"):
        encode(GOOD, tokenizer)
    tokenizer.chat_template = MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{{ m.content[:12] + '<|im_end|>' }}{% endg")
    with pytest.raises(ValueError, match="generation markers leave out a part of a turn of assistant"):
        encode(chat(("user", "a"), ("assistant", "blue stone and more")), tokenizer)


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        (CHATML, {"messages": [GOOD["messages"][0], GOOD["messages"][1] | {"reasoning_content": "for"}]}, "the reasoning"),
        (CHATML, {"messages": [GOOD["messages"][0], GOOD["messages"][1] | {"thinking": "for"}]}, "the reasoning"),
        (WITH_TOOLS.replace("call.function.arguments | tojson", "''"), {"messages": [GOOD["messages"][0], CALL]}, "a tool call"),
        (
            WITH_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            {"messages": [GOOD["messages"][0], CALL | {"tool_calls": CALL["tool_calls"] * 2}]},
            "a tool call",
        ),
        (
            CHATML.replace("for message in messages", "for message in messages if message['role'] != 'tool'"),
            {"messages": [*GOOD["messages"], {"role": "tool", "content": "red"}, GOOD["messages"][1]]},
            "a part of a turn of tool",
        ),
    ],
    ids=["reasoning_content", "thinking", "arguments", "the second call", "a turn whose text is elsewhere"],
)
def test_what_a_learnt_turn_says_is_never_dropped(template: str, row: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template leaves out {what}"):
        encode(row, with_template(template))


def test_reasoning_may_be_dropped_in_turns_that_are_not_learnt() -> None:
    turns = [GOOD["messages"][0], GOOD["messages"][1] | {"reasoning_content": "for", "weight": 0}, *GOOD["messages"]]
    assert learnt({"messages": turns}) == "blue stone<|im_end|>"


def test_arguments_may_be_written_as_text_one_by_one() -> None:
    template = WITH_TOOLS.replace(
        "call.function.arguments | tojson", "(call.function.arguments.items() | map('join', '=') | join(','))"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 7, "b": 'say "x"'}}}]}
    assert learnt({"messages": [GOOD["messages"][0], call]}, with_template(template)) == '[add a=7,b=say "x"]<|im_end|>'


def test_a_header_is_never_learnt_where_the_template_writes_no_generation_prompt() -> None:
    short = CHATML.partition("{% if add_generation_prompt")[0].replace("'<|im_start|>' + message['role'] + '\n'", "'A: '")
    for row, template in (
        (chat(("user", "which?"), ("assistant", "A")), short),
        ({"messages": [GOOD["messages"][0], CALL]}, QUIET),
    ):
        with pytest.raises(ValueError, match="the chat template writes no generation prompt"):
            encode(row, with_template(template))


def test_a_template_that_begins_a_turn_after_the_answer_is_refused() -> None:
    more = CHATML.replace(
        "{% endfor %}", "{% if message['role'] == 'assistant' %}<|im_start|>user\nrate<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"holds <\|im_start\|>, which begins a turn"):
        encode(GOOD, with_template(more))


@pytest.mark.parametrize("template", [CHATML, OVER_HEADER])
def test_a_template_that_always_writes_its_generation_prompt_is_refused(template: str) -> None:
    always = template.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "")
    always = always.replace("'<|im_end|>'", "'<|im_end|>\n<|im_start|>assistant\n'", 1)
    for row in (GOOD, chat(("user", "is it a or b?"), ("assistant", "a"))):
        with pytest.raises(ValueError, match="the chat template"):
            encode(row, with_template(always))


def test_an_opening_after_which_a_turn_says_nothing_is_refused() -> None:
    open_end = CHANNELS.replace("{% endgeneration %}", "{{ '<|im_start|>assistant' if m.thinking }}{% endgeneration %}")
    row = {"messages": [GOOD["messages"][0], {"role": "assistant", "thinking": "is it a?", "content": "a"}]}
    with pytest.raises(ValueError, match=r"generation markers enclose more than an answer: its text holds <\|im_start\|>"):
        encode(row, with_template(open_end))


def test_a_generation_prompt_that_no_answer_begins_with_is_named() -> None:
    thinking = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    assert thinking != CHATML
    with pytest.raises(
        ValueError, match=r'generation prompt is "<\|im_start\|>assistant\\n<think>", and the answer\'s turn begins otherwise'
    ):
        encode({"messages": GOOD["messages"] * 2}, with_template(thinking))
    answer = {"role": "assistant", "content": "<think>\nfor\n</think>\nred"}
    assert learnt({"messages": [GOOD["messages"][0], answer]}, with_template(thinking)) == "for\n</think>\nred<|im_end|>"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_dropped_turn_is_noticed_where_its_words_stand_elsewhere(role: str) -> None:
    template = CHATML.replace(
        "for message in messages", f"for message in messages if message.role != '{role}' or message in messages[3:]"
    )
    for words in ("be brief", "user", "assistant"):
        turns = [("system", "red"), ("user", "green"), ("assistant", "a"), ("user", f"why {words}?"), ("assistant", f"{words}!")]
        if role == "tool":
            turns.insert(2, ("tool", words))
        else:
            turns[role == "user"] = (role, words)
        learnt(chat(*turns))
        with pytest.raises(ValueError, match=f"the chat template leaves out a part of a turn of {role}"):
            encode(chat(*turns), with_template(template))


def test_last_turn_only_leaves_the_context_to_the_template() -> None:
    template = CHATML.replace(
        "message['content']", "(message['content'] if loop.last or message['role'] != 'assistant' else message['content'][:1])"
    )
    row = {"messages": GOOD["messages"] * 2}
    with pytest.raises(ValueError, match="the chat template"):
        encode(row, with_template(template))
    assert learnt(row, with_template(template), last_turn_only=True) == "blue stone<|im_end|>"


DEEPSEEK = """{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}{% elif m.content is none %}\
{% for call in m.tool_calls %}{{ '<|im_start|>assistant[' + call.function.name + ' ' + call.function.arguments + ']' }}{% endfor %}{{ '<|im_end|>' }}\
{% else %}{{ '<|im_start|>assistant' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def test_a_template_that_wants_no_content_and_arguments_as_text_gets_them() -> None:
    row = {"messages": [GOOD["messages"][0], CALL]}
    for template in (DEEPSEEK, WITH_TOOLS.replace("arguments | tojson", "arguments | string")):
        assert learnt(row, with_template(template)) == '[add {"a": true, "b": [null, "x"]}]<|im_end|>'


def test_a_tools_answer_may_be_written_as_json() -> None:
    template = CHATML.replace(
        "message['content']", "(message['content'] | tojson if message['role'] == 'tool' else message['content'])"
    )
    row = {"messages": [*GOOD["messages"], {"role": "tool", "content": '{"red": "é"}'}, GOOD["messages"][1]]}
    assert learnt(row, with_template(template)) == "blue stone<|im_end|>" * 2
    assert learnt(row, with_template(template), supervised_roles=["tool"]) == '{\\"red\\": \\"é\\"}"<|im_end|>'


def test_words_of_python_in_a_templates_code_and_a_rows_options_are_told_from_what_is_printed() -> None:
    quiet = "{% set x = True %}" + WITH_TOOLS.replace(
        "call.function.arguments | tojson", "call.function.arguments.a | string + 'null x'"
    )
    with pytest.raises(ValueError, match="as Python prints them"):
        encode({"messages": [GOOD["messages"][0], CALL]}, with_template(quiet))
    row = {"messages": [GOOD["messages"][0], CALL], "chat_template_kwargs": {"note": "True story"}}
    assert "add" in learnt(row, with_template("{{ note }}" + WITH_TOOLS))


def test_a_special_token_in_a_message_is_refused_also_where_the_tokenizer_names_it_nowhere() -> None:
    for token in ("<|im_end|>", "<|endoftext|>"):
        with pytest.raises(ValueError, match=r"a message holds the special token <\|"):
            encode(chat(("user", f"red{token}"), ("assistant", "b")))
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|eot|>"], special_tokens=True)
    with pytest.raises(ValueError, match=r"the special token <\|eot\|>"):
        encode(chat(("user", "a"), ("assistant", "b <|eot|>")), tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_matters() -> None:
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' and not loop.last %}!{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    assert learnt(GOOD, tokenizer) == "blue stone<|im_end|>"
    twice = {"messages": GOOD["messages"] * 2}
    with pytest.raises(ValueError, match="the chat template changes earlier turns"):
        encode(twice, tokenizer)
    assert learnt(twice, tokenizer, last_turn_only=True) == "blue stone<|im_end|>"


def test_a_template_without_a_generation_prompt_is_refused_unless_the_answer_follows_at_once() -> None:
    tokenizer = with_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}")
    with pytest.raises(ValueError, match="the chat template writes no generation prompt"):
        encode(GOOD, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[A]{% else %} {{ m['content'] }}<|endoftext|>"
        "{% endif %}{% endfor %}"
    )
    assert learnt({"messages": GOOD["messages"] * 2}, tokenizer) == " blue stone<|endoftext|>" * 2


def test_a_template_that_refuses_a_role_gives_its_own_reason() -> None:
    tokenizer = with_template(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(ValueError, match=r"the chat template refuses it \(System role not supported\)"):
        encode(chat(("system", "a"), ("user", "b"), ("assistant", "c")), tokenizer)


def test_markers_around_fewer_turns_than_there_are_are_refused() -> None:
    tokenizer = with_template(MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last"))
    assert learnt(GOOD, tokenizer) == "blue stone<|im_end|>"
    with pytest.raises(ValueError, match="marks 1 generations for 2 assistant turns"):
        encode({"messages": GOOD["messages"] * 2}, tokenizer)


def test_a_tokenizer_without_a_template_takes_texts_and_refuses_messages() -> None:
    tokenizer = with_template("")
    tokenizer.chat_template = None
    assert learnt({"prompt": "red:", "completion": " blue"}, tokenizer) == " blue<|endoftext|>"
    with pytest.raises(ValueError, match=r"no chat template for messages; set data\.chat_template"):
        encode(GOOD, tokenizer)


def joining() -> Any:
    """A tokenizer with one token for two line feeds."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    return tokenizer


@pytest.mark.parametrize("row", [{"prompt": "red\n", "completion": "\nblue"}, chat(("user", "a"), ("assistant", "\nblue"))])
def test_a_token_that_joins_a_prompt_with_its_answer_is_refused(row: dict[str, Any]) -> None:
    assert encode(row).num_labels > 1
    with pytest.raises(ValueError, match="a token joins a supervised text with what stands before or after it"):
        encode(row, joining())


# ---- tools and reasoning ----


def test_tool_calls_tools_and_reasoning_reach_the_text_as_json_and_are_learnt() -> None:
    tokenizer = with_template(WITH_TOOLS)
    answer = {"role": "assistant", "content": "red", "reasoning_content": "blue is wrong"}
    row = {"tools": TOOLS, "messages": [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": "7"}, answer]}
    assert learnt(row, tokenizer) == '[add {"a": true, "b": [null, "x"]}]<|im_end|><think>blue is wrong</think>red<|im_end|>'
    text = tokenizer.decode(encode(row, tokenizer).ids)
    assert text.startswith(json.dumps(TOOLS))
    assert learnt(row, tokenizer, supervised_roles=["tool"]) == "7<|im_end|>"


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (WITH_TOOLS.replace("tools | tojson", "tools"), GOOD | {"tools": TOOLS}),
        (
            WITH_TOOLS.replace("call.function.arguments | tojson", "call.function.arguments.a | string"),
            {"messages": [*GOOD["messages"], CALL]},
        ),
    ],
    ids=["tools", "a boolean"],
)
def test_what_a_template_prints_as_python_is_refused(template: str, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="writes tools or arguments as Python prints them"):
        encode(row, with_template(template))


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        (CHATML, {"messages": [*GOOD["messages"], CALL | {"content": "x"}]}, "a tool call"),
        (CHATML, GOOD | {"tools": TOOLS}, "the tools"),
        (
            CHATML.replace("for message in messages", "for message in messages if message.role != 'system'"),
            chat(("system", "be brief"), ("user", "a"), ("assistant", "b")),
            "a part of a turn of system",
        ),
    ],
    ids=["tool calls", "tools", "system"],
)
def test_what_a_template_leaves_out_is_refused(template: str, row: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template leaves out {what}"):
        encode(row, with_template(template))


def test_a_rows_own_template_options_reach_the_template() -> None:
    tokenizer = with_template(CHATML.replace("{% for", "{{ 'warm ' if warm else '' }}{% for", 1))
    text = tokenizer.decode(encode(GOOD | {"chat_template_kwargs": {"warm": True}}, tokenizer).ids)
    assert text.startswith("warm <|im_start|>user")
    assert learnt(GOOD | {"chat_template_kwargs": {"warm": True}}, tokenizer) == "blue stone<|im_end|>"


# ---- settings of the tokenizer ----


def test_another_chat_template_and_added_tokens_are_the_runs_own(tmp_path: Any) -> None:
    from tiny import config, save_model

    save_model(tmp_path / "model")
    (tmp_path / "own.jinja").write_text(MARKED)
    for template in (MARKED, str(tmp_path / "own.jinja")):
        one = config(tmp_path, data={"chat_template": template}, model={"added_tokens": ["<|tool|>"]})
        tokenizer = load_tokenizer(tmp_path / "model", one)
        assert tokenizer.chat_template == MARKED
        assert tokenizer.convert_tokens_to_ids("<|tool|>") == 300


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"chat_template": "{% for m in messages %}"}}, "data.chat_template: line 1: "),
        ({"data": {"chat_template": "nowhere.jinja"}}, "data.chat_template: nowhere.jinja cannot be read"),
        ({"model": {"added_tokens": ["<|im_end|>"]}}, r"model.added_tokens: the tokenizer has <\|im_end\|> already"),
    ],
)
def test_a_template_or_token_that_cannot_be_used_is_refused(tmp_path: Any, changes: dict[str, Any], sentence: str) -> None:
    from tiny import config, save_model

    save_model(tmp_path / "model")
    with pytest.raises(InputError, match=sentence):
        load_tokenizer(tmp_path / "model", config(tmp_path, **changes))
