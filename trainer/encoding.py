"""From a row to token ids and the mask of those that are supervised.

A turn's place in the text is never guessed. It is what the chat template's own `{% generation %}` markers say, or it is
proved: the conversation rendered up to a turn, and through it, must both begin the whole text. Where neither holds, or
where a token reaches over a turn's edge, the row is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config import DataConfig
from trainer.rows import Row, strings

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PYTHON_WORDS = ("True", "False", "None")
ELSEWHERE = "\N{SYMBOL FOR UNIT SEPARATOR} a turn \N{SYMBOL FOR UNIT SEPARATOR}"
TEMPLATE_ADVICE = "set data.chat_template to one that does not"


@dataclass(frozen=True)
class Encoded:
    """Token ids int32 [n] and which of them are supervised, bool [n]."""

    ids: np.ndarray
    supervised: np.ndarray
    weight: float
    sample: dict[str, Any] | None  # the prompt and its answer as text, where there is one

    @property
    def hash(self) -> int:
        """Of all ids."""
        return _hash(self.ids)

    @property
    def prompt_hash(self) -> int:
        """Of the ids before the first supervised one; 0 where there is no prompt."""
        return _hash(self.ids[: int(np.argmax(self.supervised))]) if self.sample else 0

    @property
    def num_labels(self) -> int:
        """Supervised tokens that something predicts: all but a row's first."""
        return int(self.supervised[1:].sum())

    def cut(self, start: int, stop: int) -> "Encoded":
        return Encoded(self.ids[start:stop], self.supervised[start:stop], self.weight, self.sample)


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


class Encoder:
    """Renders and tokenises rows for one tokenizer, chat template and choice of what is learnt."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.roles, self.last_turn_only = set(config.supervised_roles), config.last_turn_only
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()  # a tokenizer.json may carry both, and they would cut rows in silence
        self.backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special_ids = np.array(sorted({i for i, t in added.items() if t.special} | set(tokenizer.all_special_ids)), np.int32)
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self.special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)")
        self.eos = tokenizer.eos_token_id
        starts = self.backend.encode("a").ids[:1]
        self.bos = starts[0] if starts and starts[0] == tokenizer.bos_token_id else None

    def encode(self, rows: list[Row]) -> list[Encoded | ValueError]:
        """Each row's tokens, or what is wrong with it."""
        rendered: list[tuple[str, list[tuple[int, int]], bool] | ValueError] = []
        for row in rows:
            try:
                rendered.append(self._chat(row) if row.messages else (row.prompt + row.text, [], False))
            except ValueError as error:
                rendered.append(error)
        texts = [item[0] for item in rendered if not isinstance(item, ValueError)]
        tokenised = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        found: list[Encoded | ValueError] = []
        for row, item in zip(rows, rendered, strict=True):
            if isinstance(item, ValueError):
                found.append(item)
                continue
            try:
                found.append(self._tokens(row, *item, next(tokenised)))
            except ValueError as error:
                found.append(error)
        return found

    # ---- conversations ----

    def _chat(self, row: Row) -> tuple[str, list[tuple[int, int]], bool]:
        """The rendered text, the learnt turns' places in it, and whether the template itself marked these."""
        for text in strings([row.messages, row.tools]):
            if token := self.special.search(text):
                raise ValueError(f"a message holds the special token {token[0]}; remove it, or write it otherwise")
        learnt = [i for i, m in enumerate(row.messages) if row.learnable[i] and m["role"] in self.roles]
        if not learnt:
            raise ValueError(f"no turn of {' or '.join(sorted(self.roles))} to learn from; add one or remove the row")
        if self.last_turn_only:
            learnt = learnt[-1:]
        if self.roles == {"assistant"} and GENERATION.search(self._template(row)):
            text, marked = self._render(row, row.messages, marked=True)
            turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
            if len(marked) != len(turns):
                raise ValueError(
                    f"the chat template marks {len(marked)} generations for {len(turns)} assistant turns; mend its markers"
                )
            spans = [marked[turns.index(i)] for i in learnt]
        else:
            marked = []
            text, _ = self._render(row, row.messages)
            spans = [self._prove(row, text, index) for index in learnt]
        self._check_complete(row, text)
        return text, spans, bool(marked)

    def _prove(self, row: Row, text: str, index: int) -> tuple[int, int]:
        """Where in `text` the turn `index` is learnt: after the generation prompt, or from a user's or tool's own words on."""
        message = row.messages[index]
        answer = message["role"] == "assistant"
        before, _ = self._render(row, row.messages[:index], prompt=answer) if index else ("", [])
        through = text if index == len(row.messages) - 1 else self._render(row, row.messages[: index + 1])[0]
        if not (text.startswith(before) and text.startswith(through) and len(before) < len(through)):
            raise ValueError(
                "the chat template changes earlier turns, so supervised tokens cannot be told; "
                f"{TEMPLATE_ADVICE}, or data.last_turn_only"
            )
        content = message["content"].strip()
        if not answer:
            # What the template writes before a turn's own words may hold the same letters: another text shows where they begin.
            other, _ = self._render(row, [*row.messages[:index], message | {"content": ELSEWHERE}])
            start = other.find(ELSEWHERE, len(before))
            if start < 0 or not text.startswith(content, start):
                raise ValueError(f"the chat template changes a turn of {message['role']}; {TEMPLATE_ADVICE}")
            return start, len(through)
        # Some templates need no generation prompt, as the user's turn ends with it; then the answer itself must follow.
        plain, _ = self._render(row, row.messages[:index])
        if before == plain and not through[len(before) :].lstrip().startswith(content):
            raise ValueError(
                "the chat template writes no generation prompt, so an answer's start cannot be told; use one that does"
            )
        return len(before), len(through)

    def _template(self, row: Row) -> str:
        if self.tokenizer.chat_template is None:
            raise ValueError("the model's tokenizer has no chat template for messages; set data.chat_template")
        return self.tokenizer.get_chat_template(None, row.tools)

    def _render(
        self, row: Row, messages: list[dict[str, Any]], prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation and, with `marked`, where the template's own generations lie in it."""
        from jinja2 import TemplateError

        options = self.tokenizer.special_tokens_map | row.template_options
        texts: Any
        places: Any
        try:
            texts, places = render_jinja_template(
                conversations=[messages],
                tools=row.tools,  # pyright: ignore[reportArgumentType]
                chat_template=self._template(row),
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **options,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it ({error}); change the row's roles, or mend the template") from None
        except Exception as error:  # a template is a program of the user's
            raise ValueError(f"the chat template fails on it ({error}); mend the template") from None
        return texts[0], places[0] if marked else []

    def _check_complete(self, row: Row, text: str) -> None:
        """ValueError where the template left out something that the row says, or wrote an object as Python would print it."""
        squeezed = ""
        for message in row.messages:
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            for said in (message["content"], *calls):
                if said.strip() in text:
                    continue
                squeezed = squeezed or "".join(text.split())
                if "".join(said.split()) not in squeezed:
                    what = "a tool call" if said in calls else f"a part of a turn of {message['role']}"
                    raise ValueError(f"the chat template leaves out {what}; {TEMPLATE_ADVICE}")
        for tool in row.tools or ():
            name = tool.get("function", tool).get("name", "")
            if str(name) not in text:
                raise ValueError(f"the chat template leaves out the tools; {TEMPLATE_ADVICE}")
        arguments = [call["function"]["arguments"] for message in row.messages for call in message.get("tool_calls", ())]
        if row.tools or arguments:
            self._check_no_python(row, [row.tools, *arguments], text)

    def _check_no_python(self, row: Row, values: list[Any], text: str) -> None:
        """ValueError where an object, a boolean or a null of tools and arguments reads in `text` as Python would print it."""
        printed = [item for item in _objects(values) if repr(item) != json.dumps(item) and repr(item) in text]
        said = [*strings([row.messages, row.tools]), self._template(row)]
        if printed or any(text.count(word) > sum(part.count(word) for part in said) for word in PYTHON_WORDS):
            raise ValueError("the chat template writes tools or arguments as Python prints them; use one that says tojson there")

    # ---- tokens ----

    def _tokens(self, row: Row, text: str, spans: list[tuple[int, int]], marked: bool, encoding: Any) -> Encoded:
        ids = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(ids), bool)
        if row.messages:
            for start, stop in spans:
                first, last = _covered(encoding, start, stop, strict=not marked)
                if not marked:
                    last = self._without_white_space(text, encoding, ids, first, last)
                # All between the first and the last: some tokenizers give white space an empty place in the text.
                mask[first : last + 1] = True
            return Encoded(ids, mask, row.weight, self._sample(row))
        first = _covered(encoding, len(row.prompt), len(text), strict=True)[0] if row.prompt else 0
        mask[first:] = True
        if self.bos is not None and ids[:1].tolist() != [self.bos]:
            ids, mask = np.insert(ids, 0, self.bos), np.insert(mask, 0, False)
        if self.eos is not None and ids[-1:].tolist() != [self.eos]:
            ids, mask = np.append(ids, np.int32(self.eos)), np.append(mask, True)
        return Encoded(ids.astype(np.int32), mask, row.weight, self._sample(row))

    def _without_white_space(self, text: str, encoding: Any, ids: np.ndarray, first: int, last: int) -> int:
        """The last token up to the end-of-turn: white space that the template puts after it is not the model's to write."""
        ends = np.flatnonzero(np.isin(ids[first : last + 1], self.special_ids))
        if not len(ends):
            return last
        end = first + int(ends[-1])
        return last if text[encoding.token_to_chars(end)[1] : encoding.token_to_chars(last)[1]].strip() else end

    def _sample(self, row: Row) -> dict[str, Any] | None:
        """What a sample asks for: the messages before the last answer, or the prompt, and the reference."""
        if not row.messages:
            return {"prompt": row.prompt, "reference": row.text} if row.prompt else None
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant" and message["content"]]
        if not answers:
            return None
        sample = {"messages": row.messages[: answers[-1]], "reference": row.messages[answers[-1]]["content"]}
        return sample | ({"tools": row.tools} if row.tools else {})


def _covered(encoding: Any, start: int, stop: int, strict: bool) -> tuple[int, int]:
    """First and last token of the characters start:stop; `strict` refuses a token that reaches over an edge."""
    # Some tokenizers give white space no place in the text, so that its characters have no token.
    first = next((token for i in range(start, stop) if (token := encoding.char_to_token(i)) is not None), None)
    last = next((token for i in range(stop - 1, start - 1, -1) if (token := encoding.char_to_token(i)) is not None), None)
    if first is None or last is None:
        raise ValueError("a turn to learn from has no tokens; write its text or remove it")
    if strict and (encoding.token_to_chars(first)[0] < start or encoding.token_to_chars(last)[1] > stop):
        raise ValueError(
            "a token joins a supervised text with what stands before or after it, so its mask cannot be told; "
            "let neither begin or end with white space"
        )
    return first, last


def _objects(value: Any) -> Iterable[Any]:
    """Every object and list inside a JSON value that has something in it."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _objects(item)
