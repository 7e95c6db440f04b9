"""For the same rows, are our token ids and masks those of TRL? Exits 1 where they differ and no reason is known.

    python tests/bench/same_as_trl.py

Prints a Markdown table. Conversations are compared under the quickstart's template with generation markers, and under
every chat template that TRL ships in two forms, as the model has it and with markers added: TRL's mask comes from the
markers, ours from the markers and, on the other form, from the proof by prefixes.
"""

import functools
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chats import WORK, tokenizers

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".cache/peers/venv/bin/python"
SPECIAL = re.compile(
    r"<\|[a-zA-Z_]+\|>|<\|[a-z_\"]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<bos>|<eos>|<\uff5c[^\uff5c]+\uff5c>|</s>|\[/?INST\]"
)
PARTS = [
    "The stone is cold.",
    "Why?",
    "x = {'a': [1, 2]}\nfor y in x:\n    print(y)",
    "北の川は冷たい。",
    "Ångström naïve café",
    "👩‍👩‍👧 🇳🇴 ok",
    "e\u0301 combining",
    "שלום עולם",
    "1,234.50 €",
    "a\tb",
    "<b>html</b> & {{ braces }} {% if %}",
    "None, True and null",
    "  two  spaces  ",
    "\n\nblank lines\n\n",
    "nbsp\u00a0and\u2028separator",
    "z\u200bero width",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


# Templates of vision models want a list of parts as content; gpt-oss's with markers fails on these tools in TRL.
LEFT_OUT = re.compile(r"idefics3|smolvlm|llava_next|gptoss, tools")
# Differences that are known, and why each is right, or what follows from it.
LINE_FEED = "TRL learns the white space that the template writes after the end of a turn, which no model has to write; we do not"
OPENING = (
    "TRL's markers include what the generation prompt writes already (a role, a line feed, an empty thought); we learn what follows"
)
NEXT_ROLE = (
    "without markers this template has no end-of-turn; TRL's markers add one, so that the ids differ or one more token is learnt"
)
LAST_BYTES = (
    "where a marked span ends on a character of several tokens, TRL finds only the first of these, also where the next span "
    "of the same turn goes on from there; we learn all"
)
REWRITES = "we refuse: the chat template changes earlier turns, so supervised tokens cannot be told"
OTHER_PROMPT = "we refuse: the generation prompt (an opened thought) is other than what an answer's turn begins with"
NO_PROMPT = "we refuse: the chat template writes no generation prompt, so an answer's start cannot be told"
LOSES_CALL = "we refuse: the chat template leaves out a tool call; TRL trains on the turn without it"
REFUSALS = {
    "changes earlier turns": REWRITES,
    "generation prompt is": OTHER_PROMPT,
    "writes no generation prompt": NO_PROMPT,
    "a tool call": LOSES_CALL,
}
KNOWN = {
    "prompt and completion as messages": {LINE_FEED},
    "diffusion_gemma, chat, by markers": {LAST_BYTES},
    "diffusion_gemma, chat, by proof": {LAST_BYTES, LINE_FEED},
    "diffusion_gemma, tools, by markers": {LAST_BYTES},
    "diffusion_gemma, tools, by proof": {NO_PROMPT},
    "gemma, chat, by proof": {LINE_FEED},
    "gemma3, chat, by proof": {LINE_FEED},
    "glm4moe, chat, by proof": {NEXT_ROLE, LAST_BYTES},
    "glm4moe, tools, by proof": {NEXT_ROLE},
    "gptoss, chat, by proof": {OPENING, REWRITES},
    "lfm2, tools, by markers": {LOSES_CALL},
} | {
    f"{name}, {kind}, by proof": reasons
    for kind in ("chat", "tools")
    for names, reasons in (
        ("deepseek_r1_distill deepseekv3", {OTHER_PROMPT}),
        ("nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra", {OTHER_PROMPT}),
        ("phi3 phi3_5", {REWRITES}),
        ("lfm2", {LINE_FEED, LOSES_CALL}),
        ("lfm2_v2 qwen2_5_vl qwen3_instruct_2507 qwen3_vl", {LINE_FEED}),
        ("qwen2_5 qwen3_8", {LINE_FEED, OPENING}),
        ("qwen3 qwen3_5_nothink qwen3_5_think qwen3_6", {LINE_FEED, OPENING, REWRITES}),
        ("muse_glimmer", {OPENING}),
    )
    for name in names.split()
}


@dataclass
class Case:
    """Rows under one template: `ours` and `theirs` are its texts, None for the tokenizer's own."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]
    ours: str | None = None
    theirs: str | None = None


def text(chance: random.Random, edges: bool) -> str:
    """`edges` lets it begin or end with white space."""
    made = " ".join(chance.choices(PARTS, k=chance.randint(1, 4)))
    return made if edges else made.strip()


def chat_row(chance: random.Random, edges: bool) -> dict[str, Any]:
    turns = [("system", text(chance, edges))] if chance.random() < 0.4 else []
    for _ in range(chance.randint(1, 4)):
        turns += [("user", text(chance, edges)), ("assistant", text(chance, edges))]
    if chance.random() < 0.1:
        turns.append(("user", text(chance, edges)))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def tool_row(chance: random.Random) -> dict[str, Any]:
    """A question, a call, its answer and the reply. Tools as JSON text, as TRL wants them of a table."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": text(chance, False)}}}
    messages = [
        {"role": "user", "content": text(chance, False), "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text(chance, False), "tool_calls": None},
        {"role": "assistant", "content": text(chance, False), "tool_calls": None},
    ]
    return {"messages": messages, "tools": json.dumps(TOOLS)}


def text_pair(chance: random.Random) -> dict[str, Any]:
    return {"prompt": text(chance, False) + ":", "completion": " " + text(chance, False)}


def messages_pair(chance: random.Random) -> dict[str, Any]:
    messages = chat_row(chance, False)["messages"]
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def cases() -> list[Case]:
    own, marked = tokenizers()
    chance = random.Random(7)
    many = [chat_row(chance, edges=True) for _ in range(400)]
    found = [
        Case("chat, quickstart's template with markers", marked, many),
        Case("prompt and completion as texts", marked, [text_pair(chance) for _ in range(200)]),
        Case("prompt and completion as messages", marked, [messages_pair(chance) for _ in range(200)]),
        Case("plain text", marked, [{"text": text(chance, True)} for _ in range(200)]),
    ]
    plain = [chat_row(chance, edges=False) for _ in range(60)]
    tools = [tool_row(chance) for _ in range(40)]
    templates = json.loads(peer("templates"))
    wide = with_special_tokens(own, [form for pair in templates.values() for form in pair])
    for name, (bare, with_markers) in templates.items():
        for all_rows, kind in ((plain, "chat"), (tools, "tools")):
            if (kind == "tools" and "tools" not in bare) or LEFT_OUT.match(f"{name}, {kind}"):
                continue
            rows = [row for row in all_rows if name != "gemma" or row["messages"][0]["role"] != "system"]
            found.append(Case(f"{name}, {kind}, by markers", wide, rows, with_markers, with_markers))
            found.append(Case(f"{name}, {kind}, by proof", wide, rows, bare, with_markers))
    return found


def with_special_tokens(folder: Path, templates: list[str]) -> Path:
    """The tokenizer with every model's marks of turns as special tokens, which they are in the models' own tokenizers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    known = tokenizer.get_vocab()
    tokens = sorted({token for template in templates for token in SPECIAL.findall(template)})
    tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)
    tokenizer.save_pretrained(target := WORK / "tokenizer-wide")
    return target


def peer(*arguments: str) -> str:
    done = subprocess.run([PEERS, ROOT / "tests/bench/peers.py", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"peers.py {arguments[0]} failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]


@functools.cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """The folder's tokenizer, and our settings for it."""
    from trainer.config import TrainerConfig
    from trainer.model import load_tokenizer

    data = {"train": "unused", "sequence_length": 4096}
    config = TrainerConfig.model_validate({"name": "bench", "model": {"path": str(folder)}, "data": data})
    return load_tokenizer(folder, config), config


def our_rows(case: Case) -> list[Any]:
    from trainer.encoding import Encoder
    from trainer.rows import parse_row

    tokenizer, config = loaded(case.folder)
    if case.ours:
        tokenizer.chat_template = case.ours
    return Encoder(tokenizer, config.data).encode([parse_row(row) for row in case.rows])


def compare(case: Case, theirs: Any) -> Counter[str]:
    """How many rows are the same, and how many differ in each way."""
    tokenizer, _ = loaded(case.folder)
    if isinstance(theirs, str):
        return Counter({f"TRL refuses all: {theirs.splitlines()[0][:100]}": len(case.rows)})
    found: Counter[str] = Counter()
    for ours, row in zip(our_rows(case), theirs, strict=True):
        if isinstance(ours, ValueError):
            known = next((kind for words, kind in REFUSALS.items() if words in str(ours)), None)
            found[known or f"we refuse: {str(ours).partition(';')[0]}"] += 1
            continue
        ids, learnt = ours.ids.tolist(), ours.supervised.tolist()
        if ids != row["ids"]:
            at_end = case.name.startswith("glm4moe") and ids == row["ids"][:-1]
            found[NEXT_ROLE if at_end else "other ids"] += 1
            continue
        kinds = differences(tokenizer, ids, learnt, [label != -100 for label in row["labels"]])
        found.update(kinds or {"same"})
    return found


def differences(tokenizer: Any, ids: list[int], ours: list[bool], theirs: list[bool]) -> set[str]:
    """The kind of each run of tokens that only one of the two learns."""
    kinds = set()
    places = [(a, b) for a, b in zip(ours, theirs, strict=True)]
    start = 0
    for (a, b), run in itertools.groupby(places):
        stop = start + len(list(run))
        if a != b:
            text = tokenizer.decode(ids[start:stop])
            after_learnt, before_learnt = start > 0 and ours[start - 1], stop < len(ids) and ours[stop]
            if a and text.startswith("\N{REPLACEMENT CHARACTER}") and after_learnt:
                kinds.add(LAST_BYTES)
            elif a:
                kinds.add(f"we alone learn {text!r}")
            elif after_learnt and not text.strip():
                kinds.add(LINE_FEED)
            elif after_learnt and text == "<|user|>":
                kinds.add(NEXT_ROLE)
            elif before_learnt:
                kinds.add(OPENING)
            else:
                kinds.add(f"TRL alone learns {text!r}")
        start = stop
    return kinds


def measure() -> tuple[dict[str, Counter[str]], list[str]]:
    """The rows of each case by what became of them, and what was not expected."""
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = cases()
    jobs, job_of = {}, {}
    for case in chosen:  # proof and markers share TRL's side
        job_of[case.name] = case.name.replace("by proof", "by markers")
        jobs.setdefault(job_of[case.name], {"tokenizer": str(case.folder), "template": case.theirs, "rows": case.rows})
    (WORK / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    theirs = json.loads(peer("encode", str(WORK / "jobs.json")))
    found = {case.name: compare(case, theirs[job_of[case.name]]) for case in chosen}
    unexpected = [
        f"{name}: {count} rows: {kind}"
        for name, kinds in found.items()
        for kind, count in kinds.items()
        if kind != "same" and kind not in KNOWN.get(name, ())
    ]
    return found, unexpected


def table(found: dict[str, Counter[str]]) -> str:
    """As Markdown: the rows of each case, and under it the reasons by letter."""
    letters = {
        kind: chr(ord("a") + number)
        for number, kind in enumerate(dict.fromkeys(kind for kinds in found.values() for kind in kinds if kind != "same"))
    }
    lines = ["| Rows | The same | Different, by reason |", "|---|---:|---|"]
    for name, kinds in found.items():
        others = ", ".join(f"{count} ({letters[kind]})" for kind, count in kinds.items() if kind != "same")
        lines.append(f"| {name} | {kinds['same']} | {others} |")
    return "\n".join([*lines, "", *(f"- ({letter}) {kind}." for kind, letter in letters.items())])


def main() -> int:
    found, unexpected = measure()
    print(table(found))
    for line in unexpected:
        print(f"not expected: {line}", file=sys.stderr)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
