"""From a row to token ids and the mask of those that are supervised.

A turn's place in the text is never guessed. It is what the chat template's own `{% generation %}` markers say, or it is
proved: the conversation rendered up to a turn, and through it, must both begin the whole text. Either way all that the
turn says must stand there. Where that fails, or where a token reaches over a turn's edge, the row is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from tokenizers import Tokenizer, processors

from trainer.config import DataConfig
from trainer.rows import Row, strings
from trainer.templates import ELSEWHERE, ChatTemplate, Place
from trainer.words import Words

TEMPLATE_ADVICE = "set data.chat_template to one that does not"


@dataclass(frozen=True)
class Encoded:
    """Token ids int32 [n] and which of them are supervised, bool [n]. What is cut keeps the hashes of its whole row."""

    ids: np.ndarray
    supervised: np.ndarray
    weight: float
    sample: dict[str, Any] | None  # the prompt and its answer as text, where there is one
    hash: int  # of all ids
    prompt_hash: int  # of the ids before the first supervised one; 0 where there is no prompt

    @classmethod
    def whole(cls, ids: np.ndarray, supervised: np.ndarray, weight: float, sample: dict[str, Any] | None) -> "Encoded":
        start = int(np.argmax(supervised))
        return cls(ids, supervised, weight, sample, _hash(ids), _hash(ids[:start]) if sample and start else 0)

    @property
    def num_labels(self) -> int:
        """Supervised tokens that something predicts: all but a row's first."""
        return int(self.supervised[1:].sum())

    def cut(self, start: int, stop: int) -> "Encoded":
        return replace(self, ids=self.ids[start:stop], supervised=self.supervised[start:stop])


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


class Encoder:
    """Renders and tokenises rows for one tokenizer, chat template and choice of what is learnt."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.roles, self.last_turn_only = set(config.supervised_roles), config.last_turn_only
        # Kept of the tokenizer is only what is needed, so that a process which is sent this imports neither torch nor transformers' models.
        self.texts = {}
        if tokenizer.chat_template is not None:
            self.texts = {False: tokenizer.get_chat_template(None, None), True: tokenizer.get_chat_template(None, [{}])}
        self.variables = dict(tokenizer.special_tokens_map)
        # A tokenizer.json may truncate and pad, which would cut rows in silence, and leave white space out of offsets.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        starts = backend.encode("a").ids[:1]
        self.bos = starts[0] if starts and starts[0] == tokenizer.bos_token_id else None
        backend.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore[reportAttributeAccessIssue]
        self.words = Words(backend)
        added = tokenizer.added_tokens_decoder
        self.special_ids = np.array(sorted({i for i, t in added.items() if t.special} | set(tokenizer.all_special_ids)), np.int32)
        self.is_special = np.zeros(max([backend.get_vocab_size(), *self.special_ids + 1]), bool)
        self.is_special[self.special_ids] = True
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self.special_tokens = tuple(sorted(special, key=len, reverse=True))
        self.special = re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")
        self.eos = tokenizer.eos_token_id
        self.templates: dict[str, ChatTemplate] = {}

    def encode(self, rows: list[Row]) -> list[Encoded | ValueError]:
        """Each row's tokens, or what is wrong with it."""
        rendered: list[tuple[str, list[Place], bool] | ValueError] = []
        for row in rows:
            try:
                rendered.append(self._chat(row) if row.messages else (row.prompt + row.text, [], False))
            except ValueError as error:
                rendered.append(error)
        texts = [item[0] for item in rendered if not isinstance(item, ValueError)]
        tokenised = iter(self.words.encode(texts))
        found: list[Encoded | ValueError] = []
        for row, item in zip(rows, rendered, strict=True):
            if isinstance(item, ValueError):
                found.append(item)
                continue
            try:
                found.append(self._tokens(row, *item, *next(tokenised)))
            except ValueError as error:
                found.append(error)
        return found

    # ---- conversations ----

    def _chat(self, row: Row) -> tuple[str, list[Place], bool]:
        """The rendered text, the learnt turns' places in it, and whether the template itself marked these."""
        for text in strings([row.messages, row.tools]):
            if token := self.special.search(text):
                raise ValueError(f"a message holds the special token {token[0]}; remove it, or write it otherwise")
        learnt = [i for i, m in enumerate(row.messages) if row.learnable[i] and m["role"] in self.roles]
        if not learnt:
            raise ValueError(f"no turn of {' or '.join(sorted(self.roles))} to learn from; add one or remove the row")
        if self.last_turn_only:
            learnt = learnt[-1:]
        template = self._template(row)
        marked = self.roles == {"assistant"} and template.has_markers
        if marked:
            text, places = self._marked(row, template)
        else:
            text = self._render(row, row.messages)
            places = {index: self._prove(row, text, index) for index in learnt}
        self._check_tools(row, text, template)
        self._check_turns(row, text, places, learnt, marked)
        for index, place in places.items():
            if token := _other_start(text, row.messages[index], *place, template):
                what = "the chat template's generation markers enclose" if marked else "the chat template writes"
                raise ValueError(f"{what} more than an answer: its text holds {token}, which begins a turn; {TEMPLATE_ADVICE}")
        return text, [places[index] for index in learnt], marked

    def _marked(self, row: Row, template: ChatTemplate) -> tuple[str, dict[int, Place]]:
        """The text, and where the template's markers say that each assistant's turn lies, its end-of-turn included."""
        if not template.marks_answers:
            raise ValueError(
                "the chat template's generation markers enclose other text than the answers; "
                "put them round each answer and its end-of-turn"
            )
        text, marks = template.render(row.messages, row.tools, row.template_options, marked=True)
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):
            raise ValueError(f"the chat template marks {len(marks)} generations for {len(turns)} assistant turns; mend its markers")
        return text, {turn: self._with_end(text, *mark, template) for turn, mark in zip(turns, marks, strict=True)}

    def _with_end(self, text: str, start: int, stop: int, template: ChatTemplate) -> Place:
        """A marked turn with the end-of-turn that directly follows it: what ends an answer is always learnt."""
        after = self.special.match(text, stop)
        if after and not template.starts.fullmatch(after[0]) and not text[start:stop].endswith(self.special_tokens):
            return start, after.end()
        return start, stop

    def _prove(self, row: Row, text: str, index: int) -> Place:
        """Where in `text` the turn `index` is learnt: after the generation prompt, or from a user's or tool's own words on."""
        message = row.messages[index]
        answer = message["role"] == "assistant"
        before = self._render(row, row.messages[:index], prompt=answer) if index else ""
        through = text if index == len(row.messages) - 1 else self._render(row, row.messages[: index + 1])
        if not (text.startswith(before) and text.startswith(through) and len(before) < len(through)):
            self._refuse_change(row, text, before, through, index)
        prompt = self._template(row).prompt
        if answer and ((prompt and before.endswith(prompt)) or before != self._render(row, row.messages[:index])):
            return len(before), len(through)
        # What the template writes before a turn's own words may hold the same letters: another text shows where they begin.
        other = self._render(row, [*row.messages[:index], message | {"content": ELSEWHERE}])
        start = other.find(ELSEWHERE, len(before))
        if not answer:
            if start < 0 or not any(text.startswith(form, start) for form in _forms(message["content"], escaped=True)):
                raise ValueError(f"the chat template changes a turn of {message['role']}; {TEMPLATE_ADVICE}")
            return start, len(through)
        # Some templates need no generation prompt, as the user's turn ends with it; then the answer itself must follow.
        if start < 0 or other[:start].rstrip() != before.rstrip():
            raise ValueError(
                "the chat template writes no generation prompt, so an answer's start cannot be told; use one that does"
            )
        return len(before), len(through)

    def _refuse_change(self, row: Row, text: str, before: str, through: str, index: int) -> NoReturn:
        """ValueError for a text that does not go on as its beginning does: from its generation prompt, or from earlier turns."""
        earlier = self._render(row, row.messages[:index]) if index else ""
        prompt = before[len(earlier) :].strip()
        if text.startswith(through) and text.startswith(earlier) and before.startswith(earlier) and prompt:
            raise ValueError(
                f"the chat template's generation prompt is {json.dumps(prompt, ensure_ascii=False)}, and the answer's turn begins "
                "otherwise; set data.chat_template to one with generation markers, or whose prompt each answer's turn begins with"
            )
        raise ValueError(
            f"the chat template changes earlier turns, so supervised tokens cannot be told; {TEMPLATE_ADVICE}, or data.last_turn_only"
        )

    def _template(self, row: Row) -> ChatTemplate:
        if not self.texts:
            raise ValueError("the model's tokenizer has no chat template for messages; set data.chat_template")
        text = self.texts[row.tools is not None]
        if text not in self.templates:
            self.templates[text] = ChatTemplate(text, self.special, self.variables, row.tools)
        return self.templates[text]

    def _render(self, row: Row, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self._template(row).render(messages, row.tools, row.template_options, prompt)[0]

    # ---- what a template may not leave out or change ----

    def _check_turns(self, row: Row, text: str, places: dict[int, Place], learnt: list[int], marked: bool) -> None:
        """ValueError where a turn is not written whole: in its own place, or after the turn before it where it has none."""
        at = 0
        for index, message in enumerate(row.messages):
            start, stop = places.get(index, (at, len(text)))
            if start < at:
                raise ValueError(f"the chat template's generation markers enclose more than an answer; {TEMPLATE_ADVICE}")
            if index in learnt or not (self.last_turn_only and message["role"] != "system"):
                # A generation prompt may hold the answer's first letters.
                begin = start if marked or index not in places else max(at, start + 1 - len(message["content"].strip()))
                if message["role"] == "system" and index not in places:
                    begin = 0  # templates move it, into the first or last question
                end, missing = _written(text, message, begin, stop, index in learnt)
                if not missing and index not in places and self._is_lost(row, index):
                    missing = f"a part of a turn of {message['role']}"
                if missing:
                    what = "'s generation markers leave out" if marked and index in places else " leaves out"
                    raise ValueError(f"the chat template{what} {missing}; {TEMPLATE_ADVICE}")
                at = max(at, end) if message["role"] != "system" else at
            at = stop if index in places else at

    def _is_lost(self, row: Row, index: int) -> bool:
        """Whether a turn's words, which stand elsewhere in the row or the template, too, are not written for this turn."""
        message = row.messages[index]
        said = message["content"].strip()
        others = [*row.messages[:index], *row.messages[index + 1 :]]
        texts = [self._template(row).constants, *(value for other in others for value in other.values() if isinstance(value, str))]
        if not said or not any(said in text for text in texts):
            return False
        # Another text in their place tells.
        return ELSEWHERE not in self._render(
            row, [*row.messages[:index], message | {"content": ELSEWHERE}, *row.messages[index + 1 :]]
        )

    def _check_tools(self, row: Row, text: str, template: ChatTemplate) -> None:
        """ValueError where the template leaves out the tools, or writes values of tools or calls as Python would print them."""
        for tool in row.tools or ():
            if str(tool.get("function", tool).get("name", "")) not in text:
                raise ValueError(f"the chat template leaves out the tools; {TEMPLATE_ADVICE}")
        calls = [call["function"]["arguments"] for message in row.messages for call in message.get("tool_calls", ())]
        items = [item for value in [row.tools, *calls] for item in _items(value)]
        printed = any(
            isinstance(item, dict | list) and repr(item) != json.dumps(item) and repr(item) in text for item in items if item
        )
        written = [row.tools] if template.python_calls else [row.tools, *calls]  # where calls are Python, True is right
        constants = {repr(item) for value in written for item in _items(value) if item is None or isinstance(item, bool)}
        words = [word for word in constants if word in text]
        said = [template.constants, *strings([row.messages, row.tools, row.template_options])] if words else []
        if printed or any(text.count(word) > sum(part.count(word) for part in said) for word in words):
            raise ValueError("the chat template writes tools or arguments as Python prints them; use one that says tojson there")

    # ---- tokens ----

    def _tokens(self, row: Row, text: str, spans: list[Place], marked: bool, ids: np.ndarray, places: np.ndarray) -> Encoded:
        mask = np.zeros(len(ids), bool)
        if row.messages:
            for start, stop in spans:
                first, last = _covered(places, start, stop, strict=not marked)
                if not marked:
                    last = self._without_white_space(text, places, ids, first, last)
                mask[first : last + 1] = True  # with any that have no place of their own
            return Encoded.whole(ids, mask, row.weight, self._sample(row))
        first = _covered(places, len(row.prompt), len(text), strict=True)[0] if row.prompt else 0
        mask[first:] = True
        if self.bos is not None and ids[:1].tolist() != [self.bos]:
            ids, mask = np.insert(ids, 0, self.bos), np.insert(mask, 0, False)
        if self.eos is not None and ids[-1:].tolist() != [self.eos]:
            ids, mask = np.append(ids, np.int32(self.eos)), np.append(mask, True)
        return Encoded.whole(ids.astype(np.int32), mask, row.weight, self._sample(row))

    def _without_white_space(self, text: str, places: np.ndarray, ids: np.ndarray, first: int, last: int) -> int:
        """The last token up to the end-of-turn: white space that the template puts after it is not the model's to write."""
        ends = np.flatnonzero(self.is_special[ids[first : last + 1]])
        if not len(ends):
            return last
        end = first + int(ends[-1])
        return last if text[places[end, 1] : places[last, 1]].strip() else end

    def _sample(self, row: Row) -> dict[str, Any] | None:
        """What a sample asks for: the messages before the last answer, or the prompt, and the reference."""
        if not row.messages:
            return {"prompt": row.prompt, "reference": row.text} if row.prompt else None
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant" and message["content"]]
        if not answers:
            return None
        sample = {"messages": row.messages[: answers[-1]], "reference": row.messages[answers[-1]]["content"]}
        given = {"tools": row.tools, "options": row.template_options}
        return sample | {key: value for key, value in given.items() if value}


def _covered(places: np.ndarray, start: int, stop: int, strict: bool) -> tuple[int, int]:
    """First and last token of the characters start:stop, given each token's; `strict` refuses one that reaches over an edge."""
    inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < stop))
    if not len(inside):
        raise ValueError("a turn to learn from has no tokens; write its text or remove it")
    if strict and (places[inside, 0].min() < start or places[inside, 1].max() > stop):
        raise ValueError(
            "a token joins a supervised text with what stands before or after it, so its mask cannot be told; "
            "let neither begin or end with white space"
        )
    return int(inside[0]), int(inside[-1])


def _other_start(text: str, message: dict[str, Any], start: int, stop: int, template: ChatTemplate) -> str | None:
    """The special token in text[start:stop] that begins another turn than the message's own, or one in which it says nothing.

    A template may write an answer in several parts, or have its markers enclose the turn's opening, which is then learnt.
    """
    calls = message.get("tool_calls")
    last = calls[-1]["function"]["name"] if calls else message["content"]
    for found in template.starts.finditer(text, start, stop):
        said_from = found.start() + len(template.opening)
        own = message["role"] == "assistant" and template.opening and text.startswith(template.opening, found.start())
        if not own or _find(text, last, said_from, stop, escaped=True) < 0:
            return found[0]
    return None


def _written(text: str, message: dict[str, Any], start: int, stop: int, learnt: bool) -> tuple[int, str]:
    """Where in text[start:stop] all that a message says has been written, and what of it has not.

    Each part is taken at the first place where it may be, so nothing that a template does write in order is missed.
    """
    role, content = message["role"], message["content"]
    said = [(content if learnt else content.rpartition("</think>")[2], f"a part of a turn of {role}")]
    if learnt:
        said += [(message.get(key, ""), f"the reasoning of a turn of {role}") for key in ("reasoning_content", "thinking")]
    end = start
    for part, what in said:
        found = _find(text, part, start, stop, escaped=role == "tool")
        if found < 0:
            return start, what
        end = max(end, found)
    at = start
    for call in message.get("tool_calls", ()):
        parts = [call["function"]["name"], *_scalars(call["function"]["arguments"])]
        found = [_find(text, part, at, stop, escaped=True) for part in parts]
        if min(found) < 0:
            return start, "a tool call"
        at = max(found)
    return max(end, at), ""


def _forms(said: str | float, escaped: bool) -> set[str]:
    """How a value may be written, white space around it aside: as it is or, with `escaped`, inside a JSON or Python string."""
    if not isinstance(said, str):
        return {json.dumps(said), repr(said)}
    said = said.strip()
    if not escaped:
        return {said}
    python = said.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return {said, python, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1]}


def _find(text: str, said: str | float, start: int, stop: int, escaped: bool) -> int:
    """Where the first place of text[start:stop] ends at which `said` is written, with any white space; -1 where none is."""
    found = [(at, at + len(form)) for form in _forms(said, escaped) if (at := text.find(form, start, stop)) >= 0]
    if found:
        return min(found)[1]
    spaced = re.compile(r"\s+".join(map(re.escape, str(said).split()))).search(text, start, stop)
    return spaced.end() if spaced else -1


def _items(value: Any) -> Iterator[Any]:
    """A JSON value and all that is inside it."""
    yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _items(item)


def _scalars(arguments: Any) -> list[str | float]:
    """The texts, numbers and booleans of a call's arguments."""
    return [item for item in _items(arguments) if isinstance(item, str | bool | int | float)]
