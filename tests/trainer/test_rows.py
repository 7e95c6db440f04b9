"""The forms that a row may have, and every way in which one is refused."""

import json
from typing import Any

import pytest
from stores import chat

from trainer.rows import parse_line, parse_row

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def with_call(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, CALL | changes]}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"messages": [', "not valid JSON (Expecting value at column 15)"),
        (b"[1]", "not a JSON object; write"),
        (b'{"a": "\xff"}', "byte 8 is not UTF-8"),
        (json.dumps({"text": "a"}).encode("utf-16"), "byte 1 is not UTF-8"),
        ('{"text": "a"}'.encode("utf-32-le"), "not valid JSON"),
        (b'{"text": "x", "text": "y"}', "the key 'text' stands twice in an object; remove one"),
        (b'{"messages": ' + b"[" * 100_000, "not valid JSON (a number too long, or too deep)"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "not valid JSON (a number too long, or too deep)"),
    ],
)
def test_a_line_that_is_no_json_object_is_refused(line: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        parse_line(line)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"txt": "x", "id": None}, "no messages, prompt with completion, or text (it has txt); write"),
        ({"messages": []}, "messages is not a list of messages; write"),
        ({"messages": ["a"]}, "a message is not an object"),
        (chat(("human", "a"), ("gpt", "b")), "role 'human' is unknown; write system, user, assistant or tool"),
        (chat(("user", "a"), ("assistant", 3)), "a message's content is not text; write a string"),
        (
            chat(("user", "a"), ("assistant", [{"type": "text", "text": "b"}])),
            "a message's content is not text; write one string, its parts' texts joined",
        ),
        (chat(("user", "a"), ("assistant", "  ")), "an assistant turn is empty; write its text or remove it"),
        (chat(("user", "a"), ("assistant", None)), "an assistant turn is empty"),
        (chat(("user", None), ("assistant", "a")), "a message has no content; write a string"),
        (chat(("system", "s"), ("assistant", "a"), ("user", "b")), "an assistant turn comes first, an answer to nothing"),
        (chat(("tool", "a"), ("assistant", "b")), "a tool's answer comes first, an answer to nothing"),
        (chat(("user", "a"), ("assistant", "\ud800")), "a text holds half a character"),
        ({"messages": [{"role": "user", "content": "a", "colour": "x"}]}, "a message has the unknown key 'colour'; remove it"),
        ({"messages": [{"role": "user", "content": "a", "train": False}]}, "a message has the unknown key 'train'; write weight 0"),
        ({"messages": [{"role": "user", "content": "a", "weight": 0.5}]}, "a message's weight is neither 0 nor 1"),
        (chat(("user", "a"), ("assistant", "b"), weight=0), "the row's weight is no number from"),
        (chat(("user", "a"), ("assistant", "b"), weight="2"), "the row's weight is no number from"),
        (chat(("user", "a"), ("assistant", "b"), tools="[1"), "tools are not valid JSON"),
        (chat(("user", "a"), ("assistant", "b"), tools=["add"]), "tools is not a list of objects"),
        (chat(("user", "a"), ("assistant", "b"), chat_template_kwargs=1), "chat_template_kwargs is not an object"),
        (with_call(role="user", content="b"), "a turn of user has tool_calls; only an assistant's may"),
        (with_call(tool_calls={}), "tool_calls is not a list"),
        (with_call(tool_calls=[{"function": {}}]), "a tool call has no function name"),
        (with_call(tool_calls=[{"function": {"name": "add", "arguments": "{"}}]), "a tool call's arguments are not valid JSON"),
        (with_call(tool_calls=[{"function": {"name": "add", "arguments": [1]}}]), "a tool call's arguments are no JSON object"),
        (
            with_call(tool_calls=[{"function": {"name": "add", "arguments": {"a": b"x"}}}]),
            "arguments hold a value that JSON has no",
        ),
        (with_call(tool_calls=[{"function": {"name": "add", "arguments": {"a": "\ud800"}}}]), "a text holds half a character"),
        (with_call(tool_calls=[{"function": {"name": "\ud800"}}]), "a text holds half a character"),
        (with_call(tool_calls=[{"function": {"name": "add", "arguments": '{"a": NaN}'}}]), "arguments are not valid JSON"),
        (chat(("user", "a"), ("assistant", "b"), tools=[{"name": "f", "x": "\ud800"}]), "a text holds half a character"),
        (chat(("user", "a"), ("assistant", "b"), chat_template_kwargs={"w": "\ud800"}), "a text holds half a character"),
        (
            chat(("user", "a"), ("assistant", "b"), chat_template_kwargs={"messages": []}),
            "chat_template_kwargs may not set messages",
        ),
        (
            chat(("user", "a"), ("assistant", "b"), tools=[{"type": "function", "function": "add"}]),
            "a tool's function is no object",
        ),
        (chat(("user", "a"), ("assistant", "b"), tools=[{"type": "function", "function": None}]), "a tool's function is no object"),
        (chat(("user", "a"), ("assistant", "b"), weight=1e-7), "the row's weight is no number from 1e-06 to 1e+06; write one"),
        (chat(("user", "a"), ("assistant", "b"), weight=1e7), "the row's weight is no number from"),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            "rename conversations to messages, from to role and value to content",
        ),
        (chat(("developer", "a")), "role 'developer' is unknown; write system"),
        ({"prompt": "a", "completion": ""}, "the completion is empty; write its text or remove the row"),
        ({"prompt": "a", "completion": ["b"]}, "prompt and completion are not both texts or both messages"),
        ({"prompt": "a"}, "no messages, prompt with completion, or text (it has prompt)"),
        ({"text": " "}, "text is empty or not a string"),
    ],
)
def test_a_bad_row_is_refused_with_what_to_write(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".*") as refused:
        parse_row(row)
    assert sentence in str(refused.value)


def test_a_null_is_an_absent_key() -> None:
    plain = chat(("user", "a"), ("assistant", "b"))
    wide = {"text": None, "messages": [m | {"tool_calls": None, "name": None} for m in plain["messages"]], "weight": None}
    assert parse_row(wide) == parse_row(plain)


def test_arguments_and_tools_may_come_as_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    as_text = with_call(tool_calls=[{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}])
    assert parse_row(as_text | {"tools": json.dumps(tools)}) == parse_row(with_call() | {"tools": tools})


def test_empty_text_in_the_place_of_arguments_or_tools_means_none() -> None:
    parsed = parse_row(with_call(tool_calls=[{"function": {"name": "add", "arguments": ""}}]) | {"tools": ""})
    assert parsed.tools is None
    assert parsed.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_turn_with_tool_calls_alone_has_empty_text_and_never_the_word_none() -> None:
    assert parse_row(with_call(content=None)).messages[1]["content"] == ""


def test_only_completions_of_messages_and_turns_of_weight_1_may_be_learnt() -> None:
    turns = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))["messages"]
    assert parse_row({"prompt": turns[:3], "completion": turns[3:]}).learnable == [False, False, False, True]
    weighted = [turns[0], turns[1] | {"weight": 0}, *turns[2:]]
    parsed = parse_row({"messages": weighted})
    assert parsed.learnable == [True, False, True, True]
    assert "weight" not in parsed.messages[1]
