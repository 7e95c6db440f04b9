"""Settings: what is refused, in which words, and what the fingerprint covers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import InputError, RunFile, TrainerConfig, load_settings, parse_settings

BASE: dict[str, Any] = {"name": "demo", "model": {"path": "org/model"}, "data": {"train": "rows.jsonl"}}


def with_(**changes: Any) -> TrainerConfig:
    return parse_settings(TrainerConfig, BASE | changes, "file.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optmi": {"lr": 1}}, "file.json: optmi: unknown setting; did you mean optim?"),
        ({"optim": {"learning": 1}}, "file.json: optim.learning: unknown setting; known are lr, beta1"),
        ({"model": {"pth": "x"}}, "file.json: model.pth: unknown setting; did you mean path?"),
        ({"optim": {"lr": 0}}, "file.json: optim.lr: input should be greater than 0, not 0"),
        ({"optim": {"lr": float("nan")}}, "file.json: optim.lr: input should be a finite number, not nan"),
        ({"name": "My Run"}, "file.json: name: 'My Run' is not allowed; The run's name: lower-case letters"),
        ({"duration": {"epochs": 1, "steps": 2}}, "file.json: duration: exactly one of epochs, steps and tokens must be set"),
        (
            {"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}},
            "file.json: schedule: only one of warmup_steps and warmup_ratio may",
        ),
        ({"duration": {}}, "file.json: duration: exactly one of epochs, steps and tokens must be set"),
        ({"storage": {"uri": "file:///tmp"}}, "file.json: storage.uri: 'file:///tmp' is not allowed; Where runs are kept"),
        ({"storage": {"uri": "s3://"}}, "file.json: storage.uri: 's3://' is not allowed"),
        ({"storage": {"uri": ""}}, "file.json: storage.uri: "),
        (
            {"data": {"train": "a", "eval": {"train": "b"}}},
            "file.json: data: the evaluation set train has the training rows' name;",
        ),
        ({"data": {"train": {"path": "a"}}}, "file.json: data.train: write a list of sources, such as [{path: "),
        ({"data": {"train": "a", "eval": {"A-b": "b"}}}, "file.json: data.eval.A-b: 'A-b' is not allowed; it must match ^[a-z]"),
        (
            {"model": {"path": "a", "added_tokens": ["<|x|>", " "]}},
            "file.json: model.added_tokens.1: ' ' is not allowed; Special tokens that the tokenizer lacks",
        ),
        ({"data": "rows.jsonl"}, "file.json: data: input should be a valid dictionary"),
    ],
)
def test_bad_settings_get_one_sentence_with_file_and_key(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        with_(**changes)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(InputError, match=r"^file\.json: data\.train: must be set$"):
        with_(data={})


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("run.json", '{"trainer": {},\n "hardware": }', "run.json:2: not valid JSON (Expecting value)"),
        ("run.yaml", "trainer: {}\nhardware: [", "run.yaml:2: not valid YAML"),
        ("run.json", "[]", "run.json: holds no settings"),
        ("run.yaml", "", "run.yaml: holds no settings"),
    ],
)
def test_a_file_that_does_not_parse_is_named_with_its_line(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        load_settings(RunFile, tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path}/{sentence}")


def test_numbers_arrive_as_helm_and_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: demo\nmodel: {path: m}\ndata: {train: d}\noptim: {lr: 2e-05}\nduration: {tokens: 1e+06}\nseed: 0\n"
    )
    made = load_settings(TrainerConfig, tmp_path / "run.yaml")
    assert (made.optim.lr, made.duration.tokens, made.seed) == (2e-5, 1_000_000, 0)


def test_set_overrides_one_setting_and_refuses_what_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(BASE))
    assert load_settings(TrainerConfig, path, ["optim.lr=3e-4", "batch.sequences=2"]).optim.lr == 3e-4
    for text, sentence in (
        ("optim.lr", "write it as a.b=value"),
        ("name.x=1", "name is a single value"),
        ("optim.x=1", "unknown setting"),
    ):
        with pytest.raises(InputError, match=sentence):
            load_settings(TrainerConfig, path, [text])


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": {"uri": "s3://bucket/runs"}},
        {"log_every_steps": 7},
        {"checkpoint": {"every_steps": 3, "keep_last": 9}},
        {"evaluate": {"every_steps": 5}},
        {"batch": {"sequences": 8, "micro_batch": 4}},
        {"attention": "eager"},
        {"max_failures": 9},
        {"name": "other"},
        {"optim": {"lr": 2e-05}},
    ],
)
def test_cadence_place_and_written_defaults_leave_the_fingerprint(changes: dict[str, Any]) -> None:
    assert with_(**changes).fingerprint() == with_().fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": {"lr": 3e-5}},
        {"seed": 1},
        {"data": {"train": "rows.jsonl", "version": "2"}},
        {"batch": {"sequences": 4}},
        {"model": {"path": "org/model", "revision": "abc"}},
        {"precision": "float32"},
        {"duration": {"steps": 5}},
        {"schedule": {"warmup_ratio": 0.03}},
    ],
)
def test_what_changes_the_result_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert with_(**changes).fingerprint() != with_().fingerprint()


def test_settings_import_without_torch_ray_or_transformers() -> None:
    code = "import sys, trainer.config, trainer.cli, trainer.driver; print(sorted({'torch', 'ray', 'transformers', 'boto3'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_setting_says_what_it_is() -> None:
    def check(schema: dict[str, Any], path: str) -> list[str]:
        silent = []
        for key, value in schema.get("properties", {}).items():
            silent += [f"{path}.{key}"] if len(value.get("description", "")) < 10 else []
        return silent

    schema = TrainerConfig.model_json_schema()
    assert [key for name, part in schema["$defs"].items() for key in check(part, name)] + check(schema, "trainer") == []
