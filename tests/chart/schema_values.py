"""Hypothesis strategies for values files, read off the chart's own schema."""

from typing import Any

from hypothesis import strategies as st

# Numbers beyond this lose digits in JSON, for every reader.
EXACT = 2**53
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# What readers of YAML and shells like to take for something else.
AWKWARD = st.sampled_from(
    ["", "0", "0123", "1e3", "1e-5", "true", "null", "no", "~", "two\nlines", "a: b", "# x", "{}", "ü", "😀", " "]
)


class ValuesFrom:
    """`of(schema)` gives a strategy of the values that a (draft-07) schema takes; only what our schema uses is known."""

    def __init__(self, root: dict[str, Any]):
        self.root = root

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.of(self.root["definitions"][schema["$ref"].rpartition("/")[2]])
        if "else" in schema:
            return self.of(schema["else"])
        for choice in ("oneOf", "anyOf"):
            if choice in schema and "type" not in schema:
                return st.one_of([self.of(option) for option in schema[choice]])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return st.one_of([self.of_type(kind, schema) for kind in types])

    def of_type(self, kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        match kind:
            case "null":
                return st.none()
            case "boolean":
                return st.booleans()
            case "integer":
                return self.integers(schema)
            case "number":
                return self.numbers(schema)
            case "string":
                return self.strings(schema)
            case "array":
                return st.lists(self.of(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        return self.objects(schema)

    def integers(self, schema: dict[str, Any]) -> st.SearchStrategy[int]:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -EXACT - 1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", EXACT + 1) - 1)
        usual = [n for n in (0, 1, 10, 1000, 1_000_000, 2**31 - 1) if low <= n <= high]
        return st.one_of([st.integers(low, high), *([st.sampled_from(usual)] if usual else [])])

    def numbers(self, schema: dict[str, Any]) -> st.SearchStrategy[float]:
        if "multipleOf" in schema:
            step = schema["multipleOf"]
            count = st.integers(round(schema["minimum"] / step), round(schema["maximum"] / step))
            return count.map(lambda n: round(n * step, 6))
        low, high = (
            schema.get("minimum", schema.get("exclusiveMinimum")),
            schema.get("maximum", schema.get("exclusiveMaximum")),
        )
        floats = st.floats(
            low,
            high,
            allow_nan=False,
            allow_infinity=False,
            allow_subnormal=False,
            exclude_min="exclusiveMinimum" in schema,
            exclude_max="exclusiveMaximum" in schema,
        )
        usual = [n for n in (0.0, 1e-7, 1e-5, 2e-5, 0.1, 1.0) if (low or 0) < n < (high if high is not None else 2)]
        return st.one_of([floats, st.sampled_from(usual)])

    def strings(self, schema: dict[str, Any]) -> st.SearchStrategy[str]:
        limit = schema.get("maxLength", 200)
        if "pattern" in schema:
            found = st.from_regex(schema["pattern"].replace("$", r"\Z") if "(?" in schema["pattern"] else schema["pattern"])
            return found.map(lambda text: text.removesuffix("\n")).filter(lambda text: len(text) <= limit)
        return st.one_of(TEXT, AWKWARD).filter(lambda text: schema.get("minLength", 0) <= len(text) <= limit)

    def objects(self, schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        if "patternProperties" in schema:
            [(pattern, value)] = schema["patternProperties"].items()
            names = self.strings({"type": "string", "pattern": pattern})
            return st.dictionaries(names, self.of(value), min_size=schema.get("minProperties", 0), max_size=3)
        if "properties" not in schema:
            names = self.of(
                {"type": "string", **schema["propertyNames"]} if "pattern" in schema["propertyNames"] else schema["propertyNames"]
            )
            return st.dictionaries(names, self.of(schema["additionalProperties"]), max_size=3)
        if "oneOf" in schema:
            plain = {key: value for key, value in schema.items() if key not in ("oneOf", "minProperties")}
            return st.one_of(
                [
                    self.of({**plain, "required": option["required"]} | without_others(plain, schema["oneOf"], option))
                    for option in schema["oneOf"]
                ]
            )
        required = {name: self.of(schema["properties"][name]) for name in schema.get("required", [])}
        optional = {name: self.of(value) for name, value in schema["properties"].items() if name not in required}
        result = st.fixed_dictionaries(required, optional=optional)
        if "minProperties" in schema:
            # One at a time, where exactly one is asked for.
            return st.sampled_from(sorted(optional)).flatmap(lambda name: st.fixed_dictionaries({name: optional[name]}))
        return result


def without_others(schema: dict[str, Any], options: list[dict[str, Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """The schema's properties without those that another option of its oneOf requires."""
    others = {name for option in options if option is not chosen for name in option["required"]}
    return {"properties": {name: value for name, value in schema["properties"].items() if name not in others}}
