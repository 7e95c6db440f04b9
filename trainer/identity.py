"""Which run a name stood for last, and which of its settings have changed since."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from trainer.config import InputError, RunFile
from trainer.storage import open_storage

SHOWN = 60  # characters of a value in a sentence


def compare_with_last(run: RunFile, say: Callable[[str], None]) -> None:
    """Where the last run of this name trained something else, says what has changed, or refuses it as `on_change` has it.

    A run that has begun goes on whatever came after it.
    """
    config = run.trainer
    runs = open_storage(config.storage.uri, config.storage)
    fingerprint, key = config.fingerprint(), f"names/{config.name}.json"
    try:
        last = json.loads(runs.read(key))
        begun = runs.list(f"{config.name}-{last['fingerprint']}")
    except (FileNotFoundError, ValueError):
        last, begun = None, {}
    if last and begun and last["fingerprint"] != fingerprint and not runs.list(f"{config.name}-{fingerprint}/checkpoints"):
        before = f"{config.name}-{last['fingerprint']}"
        changes = ", ".join(differences(last["settings"], config.result()))
        if config.on_change == "refuse":
            advice = "set them back, choose another name, or set on_change to new_run"
            raise InputError(f"on_change: {before}, the last run of this name, had other settings ({changes}); {advice}")
        say(f"another run than {before}, the last of this name: {changes}")
    runs.write(key, json.dumps({"fingerprint": fingerprint, "settings": config.result()}, indent=1).encode())


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`optim.lr 1e-05 -> 2e-05` for every setting that differs, in the order of `new`."""
    before, after = dict(_flatten(old)), dict(_flatten(json.loads(json.dumps(new))))
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name} {_short(before.get(name))} -> {_short(after.get(name))}" for name in names if before.get(name) != after.get(name)
    ]


def _flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
