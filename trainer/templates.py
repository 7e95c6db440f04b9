"""A chat template as rows meet it: rendering, and what a few probes show of it once.

It knows no tokens: it says where a template's own generation markers lie, which special tokens begin a turn, and in
which form the template takes a message with tool calls.
"""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.rows import ROLES

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ELSEWHERE = "\N{SYMBOL FOR UNIT SEPARATOR} a turn \N{SYMBOL FOR UNIT SEPARATOR}"
ABSENT = "\0absent"

Place = tuple[int, int]


class ChatTemplate:
    def __init__(self, text: str, special: re.Pattern[str], variables: Mapping[str, Any], tools: list[dict[str, Any]] | None):
        self.text, self.special, self.variables = text, special, variables
        self.has_markers = bool(GENERATION.search(text))
        self.content, self.arguments_as_text, self.python_calls = "", False, False
        self._choose_call_form(tools)
        words = [part for _, kind, part in Environment().lex(text) if kind in ("data", "string")]
        self.constants = "\n".join([*words, *ROLES])
        self.prompt = ""  # the generation prompt, where a special token in it tells that no message has written it
        self.opening = ""  # what of it begins an answer's turn, too, from its first special token on
        starts = self._find_starts()
        self.starts = re.compile("|".join(map(re.escape, sorted(starts))) or r"(?!)")
        self.marks_answers = self.has_markers and self._probe_markers()

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Place]]:
        """The text of a conversation and, with `marked`, where the template's own generations lie in it.

        A generation that is marked in pieces which touch is one, and an empty one is none.
        """
        texts: Any
        places: Any
        try:
            texts, places = render_jinja_template(
                conversations=[[self._formed(message) if message.get("tool_calls") else message for message in messages]],
                tools=tools,  # pyright: ignore[reportArgumentType]
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **{**self.variables, **(options or {})},
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it ({error}); change the row's roles, or mend the template") from None
        except Exception as error:  # a template is a program of the user's
            raise ValueError(f"the chat template fails on it ({error}); mend the template") from None
        joined: list[Place] = []
        for start, stop in places[0] if marked else ():
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            if start < stop:
                joined.append((start, stop))
        return texts[0], joined

    # ---- probes ----

    def _formed(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with tool calls in the form that the template takes."""
        formed = dict(message)
        if not formed["content"].strip():
            formed["content"] = self.content
            if self.content == ABSENT:
                del formed["content"]
        if self.arguments_as_text:
            formed["tool_calls"] = [call | {"function": _as_text(call["function"])} for call in message["tool_calls"]]
        return formed

    def _choose_call_form(self, tools: list[dict[str, Any]] | None) -> None:
        """The first form of an empty content and of arguments whose calls the template writes whole; else the plain one."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "probed", "arguments": {"given": ELSEWHERE}}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for self.arguments_as_text in (False, True):
            for self.content in ("", None, ABSENT):
                try:
                    text, _ = self.render(turns, tools)
                except ValueError:
                    continue
                if "probed" in text and ELSEWHERE in text and "'given'" not in text and '\\"given' not in text:
                    self.python_calls = "probed(given=" in text
                    return
        self.content, self.arguments_as_text = "", False

    def _find_starts(self) -> set[str]:
        """The special tokens that begin a turn: the first of a generation prompt's, an answer's and a second question's."""
        turns = [{"role": role, "content": f"{ELSEWHERE}{i}"} for i, role in enumerate(["user", "assistant", "user"])]
        question, answer, second = (turn["content"] for turn in turns)
        try:
            ended, going_on = self.render(turns[:2])[0], self.render(turns)[0]
            plain, asked = self.render(turns[:1])[0], self.render(turns[:1], prompt=True)[0]
        except ValueError:
            return set()
        ends = self.special.findall(ended.rpartition(answer)[2])
        after = self.special.findall(plain.rpartition(question)[2])
        between = self.special.findall(going_on.partition(answer)[2].partition(second)[0])
        heads = (asked.rpartition(question)[2], ended.rpartition(answer)[0].rpartition(question)[2])
        answers = [[token for token in self.special.findall(head) if token not in after] for head in heads]
        if asked.startswith(plain) and self.special.search(asked, len(plain)):
            self.prompt = asked[len(plain) :]
            both = zip(self.prompt, ended.removeprefix(plain), strict=False)
            shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
            first = self.special.search(shared)
            if first and first[0] not in ends:  # else the template itself begins a turn after an answer
                self.opening = shared[first.start() :]
        questions = [token for token in between if token not in (*ends, *after)]
        return {token for tokens in (*answers, questions) for token in tokens[:1]}

    def _probe_markers(self) -> bool:
        """Whether the markers enclose each answer and nothing of another turn; told by texts that stand nowhere else."""
        turns = [{"role": role, "content": f"{ELSEWHERE}{i}"} for i, role in enumerate(["user", "assistant"] * 2)]
        try:
            text, places = self.render(turns, marked=True)
        except ValueError:
            return True  # it refuses the probe, which says nothing of rows
        said = [[i for i, turn in enumerate(turns) if turn["content"] in text[start:stop]] for start, stop in places]
        return said in ([[1], [3]], [[3]])


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
