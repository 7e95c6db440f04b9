"""Writes charts/ray-finetune/values.schema.json: the chart's own half with the trainer's models at `trainer`.

Descriptions, which editors show, come from the comments in values.yaml and from the trainer's docstrings.

    python tests/chart/generate_schema.py [--check]

The result is draft-07 and refers to nothing outside itself, since that is what every Helm 3 and 4 reads.
"""

import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any

from trainer.config import TrainerConfig

CHART = Path(__file__).parents[2] / "charts/ray-finetune"
TEMPLATE = CHART / "values.schema.tmpl.json"
SCHEMA = CHART / "values.schema.json"
# Helm prints what a constant should have been, which is the one place of a schema for a word to the user.
NUMBER_HINT = "a number: --set makes text of 1e-5, and --set-json does not"


def to_draft_07(node: Any) -> Any:
    """Pydantic writes 2020-12: definitions under $defs, tuples as prefixItems, and OpenAPI's discriminator."""
    if isinstance(node, list):
        return [to_draft_07(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "prefixItems" in node:
        node = {**node, "items": node["prefixItems"], "additionalItems": False}
    result = {}
    for key, value in node.items():
        if key in ("prefixItems", "discriminator", "title"):
            continue
        if key == "properties":
            result[key] = {name: to_draft_07(schema) for name, schema in value.items()}
        elif key in ("default", "enum", "const", "examples"):
            result[key] = value
        elif key == "$ref":
            result[key] = value.replace("#/$defs/", "#/definitions/")
        else:
            result[key] = to_draft_07(value)
    return result


def explain_numbers(node: Any) -> Any:
    """Text where a number belongs, such as `--set trainer.optim.lr=1e-5`, is refused with the way to write it."""
    if isinstance(node, list):
        return [explain_numbers(item) for item in node]
    if not isinstance(node, dict):
        return node
    if not takes_number_and_no_text(node):
        return {key: explain_numbers(value) for key, value in node.items()}
    said = {key: value for key, value in node.items() if key in ("default", "description")}
    rest = {key: value for key, value in node.items() if key not in said}
    return said | {"if": {"type": "string"}, "then": {"const": NUMBER_HINT}, "else": rest}


def takes_number_and_no_text(schema: dict[str, Any]) -> bool:
    types = [option.get("type") for option in schema.get("anyOf", [schema])]
    return "number" in types and set(types) <= {"number", "null"}


def descriptions() -> dict[tuple[str, ...], str]:
    """The `# --` comments of values.yaml by the path of the key below them."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("# -- "):
            comment = [re.sub(r"^# -- (\([a-z ]+\) )?", "", text)]
        elif text.startswith("#"):
            comment.append(text.removeprefix("# "))
        elif text:
            path = [*path[: (len(line) - len(line.lstrip())) // 2], text.partition(":")[0]]
            if comment:
                found[tuple(path)] = " ".join(comment)
            comment = []
    return found


def describe(schema: dict[str, Any]) -> None:
    for path, text in descriptions().items():
        place = schema
        for name in path:
            place = place["properties"][name]
        place["description"] = text


def build_schema() -> dict[str, Any]:
    schema = json.loads(TEMPLATE.read_text())
    describe(schema)
    trainer = TrainerConfig.model_json_schema()
    definitions = trainer.pop("$defs", {}) | {TrainerConfig.__name__: trainer}
    clash = set(definitions) & set(schema["definitions"])
    assert not clash, f"the chart and the trainer both define {sorted(clash)}"
    for name, definition in definitions.items():
        schema["definitions"][name] = explain_numbers(to_draft_07(definition))
    return schema


def main() -> int:
    text = json.dumps(build_schema(), indent=2) + "\n"
    if "--check" not in sys.argv:
        SCHEMA.write_text(text)
        return 0
    old = SCHEMA.read_text() if SCHEMA.exists() else ""
    diff = list(difflib.unified_diff(old.splitlines(True), text.splitlines(True), str(SCHEMA), "generated"))
    sys.stdout.writelines(diff)
    if diff:
        print(f"{SCHEMA.name} is out of date; run python tests/chart/generate_schema.py")
    return int(bool(diff))


if __name__ == "__main__":
    sys.exit(main())
