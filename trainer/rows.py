"""One row of a data set: the three forms it may have, and what is wrong with it.

`messages` (chat, with tools), `prompt` and `completion` (texts or messages), or `text`; where a row has several of
them, the first of this order counts. Pure Python: it knows no tokenizer and no template.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from trainer.config import Role

ROLES = get_args(Role)
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "weight"}
WEIGHTS = 1e-6, 1e6  # outside of these a loss in float32 would round to nothing or to infinity
SET_BY_US = {
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
HALVES = re.compile("[\ud800-\udfff]")  # of characters that UTF-16 writes in two
FORMS = 'write {"messages": [{"role": "user", "content": "..."}, ...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'


@dataclass(frozen=True)
class Row:
    """A conversation with the turns that may be learnt, or plain text of which all after `prompt` is learnt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    learnable: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    text: str = ""
    weight: float = 1.0


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of one JSON line; ValueError says what is wrong and what to write."""
    try:
        row = json.loads(str(line, "utf-8"), object_pairs_hook=_object)
    except _RepeatedKeyError as error:
        raise ValueError(f"the key {error.args[0]!r} stands twice in an object; remove one") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON (a number too long, or too deep); write one JSON object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object; {FORMS}")
    return row


class _RepeatedKeyError(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json.loads would keep the last of two equal keys in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def parse_row(raw: dict[str, Any]) -> Row:
    """Checks a row's form, roles and types; ValueError says what is wrong and what to write. A null is an absent key."""
    weight = raw.get("weight")
    least, most = WEIGHTS
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not least <= weight <= most):
        raise ValueError(f"the row's weight is no number from {least:g} to {most:g}; write one, or remove the row to leave it out")
    weight = 1.0 if weight is None else float(weight)
    if (messages := raw.get("messages")) is not None:
        return _chat(raw, _messages(messages, "messages"), 0, weight)
    prompt, completion, text = raw.get("prompt"), raw.get("completion"), raw.get("text")
    if prompt is not None and completion is not None:
        if isinstance(prompt, list) and isinstance(completion, list):
            return _chat(raw, _messages(prompt, "prompt") + _messages(completion, "completion"), len(prompt), weight)
        if not (isinstance(prompt, str) and isinstance(completion, str) and _is_text(prompt) and _is_text(completion)):
            raise ValueError("prompt and completion are not both texts or both messages; write two strings or two lists")
        if not completion.strip():
            raise ValueError("the completion is empty; write its text or remove the row")
        return Row(prompt=prompt, text=completion, weight=weight)
    if text is not None:
        if not _is_text(text) or not text.strip():
            raise ValueError("text is empty or not a string; write it or remove the row")
        return Row(text=text, weight=weight)
    if "conversations" in raw:
        raise ValueError("it has conversations; rename conversations to messages, from to role and value to content")
    keys = [key for key, value in raw.items() if value is not None]
    raise ValueError(f"no messages, prompt with completion, or text (it has {', '.join(keys[:5]) or 'nothing'}); {FORMS}")


def _is_text(value: Any) -> bool:
    if isinstance(value, str):
        _refuse_halves(value)
    return isinstance(value, str)


def _refuse_halves(text: str) -> None:
    if HALVES.search(text):
        raise ValueError("a text holds half a character (a lone surrogate); write it whole")


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'{key} is not a list of messages; write [{{"role": "user", "content": "..."}}, ...]')
    return [_message(message) for message in value]


def _message(value: Any) -> dict[str, Any]:
    """A message without the keys that are null, its tool calls' arguments as objects."""
    if not isinstance(value, dict):
        raise ValueError('a message is not an object; write {"role": "...", "content": "..."}')
    message = {key: item for key, item in value.items() if item is not None}
    if unknown := message.keys() - MESSAGE_KEYS:
        hint = "; write weight 0 or 1 for a turn that is learnt or not" if unknown & {"train", "training"} else ""
        raise ValueError(f"a message has the unknown key {min(unknown)!r}{hint or '; remove it'}")
    role = message.get("role")
    if role not in ROLES:
        words = "system" if role == "developer" else f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise ValueError(f"role {role!r} is unknown; write {words}")
    for key in ("content", "name", "tool_call_id", "reasoning_content", "thinking"):
        if key in message and not _is_text(message[key]):
            joined = "one string, its parts' texts joined" if isinstance(message[key], list) else "a string"
            raise ValueError(f"a message's {key} is not text; write {joined}")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError("a message's weight is neither 0 nor 1; write 0 for a turn that is not learnt")
    if "tool_calls" in message:
        if role != "assistant":
            raise ValueError(f"a turn of {role} has tool_calls; only an assistant's may")
        if not isinstance(message["tool_calls"], list):
            raise ValueError("tool_calls is not a list; write a list of function calls")
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    if not message.get("content", "").strip():
        if role == "assistant" and not message.get("tool_calls"):
            raise ValueError("an assistant turn is empty; write its text or remove it")
        if "content" not in message and role != "assistant":
            raise ValueError("a message has no content; write a string")
        message.setdefault("content", "")  # a template would print an absent one as the word None
    return message


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_text(function.get("name")):
        raise ValueError('a tool call has no function name; write {"function": {"name": "...", "arguments": {...}}}')
    arguments = _decoded(function.get("arguments"), "a tool call's arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments are no JSON object; write an object of names and values")
    kept = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function"} | kept | {"function": {"name": function["name"], "arguments": arguments}}


def _decoded(value: Any, what: str) -> Any:
    """A JSON value that may have come as its text, which is how tables keep objects of many shapes; no text is None."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError(f"{what} are not valid JSON; write an object, or its JSON text") from None
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{what} hold a value that JSON has no form for; write JSON values only") from None
    _refuse_halves("".join(strings(value)))
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _chat(raw: dict[str, Any], messages: list[dict[str, Any]], context: int, weight: float) -> Row:
    """A conversation of which the first `context` messages are not learnt."""
    first = next((message["role"] for message in messages if message["role"] != "system"), "user")
    if first in ("assistant", "tool"):
        kind = "an assistant turn" if first == "assistant" else "a tool's answer"
        raise ValueError(f"{kind} comes first, an answer to nothing; begin with a user turn")
    tools = _decoded(raw.get("tools"), "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools is not a list of objects; write a list of JSON schemas")
    if any(not isinstance(tool.get("function", tool), dict) for tool in tools or ()):
        raise ValueError("a tool's function is no object; write its name, description and parameters")
    options = _decoded(raw.get("chat_template_kwargs"), "chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise ValueError("chat_template_kwargs is not an object; write names and values for the chat template")
    if taken := SET_BY_US & (options or {}).keys():
        raise ValueError(f"chat_template_kwargs may not set {min(taken)}; remove it, as the row itself says it")
    learnable = [message.pop("weight", 1) == 1 and index >= context for index, message in enumerate(messages)]
    return Row(messages, learnable, tools or None, options or {}, weight=weight)


def strings(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, keys of objects included, in no order."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left += map(str, item)
            left += item.values()
        elif isinstance(item, list):
            left += item
