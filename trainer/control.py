"""What the driver and its workers tell one another, in an actor beside the driver that must start fast: no torch here."""

from typing import Any, NamedTuple

import ray


class News(NamedTuple):
    """What the driver hears of its workers."""

    rows: list[dict[str, Any]]
    """Of metrics.jsonl, new since it last asked."""

    groups: int
    """How often workers have begun."""

    under_way: bool
    """Whether there are workers, who can be asked to save."""

    stopping: bool
    """Whether somebody has asked the run to save and leave."""

    ending: str | None
    """How the run has ended, and `cause`, why."""

    cause: str | None


class Control:
    """An actor beside the driver: carries rows from the workers to it, and wishes the other way."""

    NAME = "ray-finetune"  # and its Ray namespace

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.groups = 0
        self.stop = self.under_way = False
        self.resizing = self.parted = False
        self.ending: str | None = None
        self.cause: str | None = None
        self.failures: list[str] = []
        self.controller: Any = None

    def news(self, stop: bool) -> News:
        """For the driver, which passes on whether it was asked to stop."""
        self.stop = self.stop or stop
        rows, self.rows = self.rows, []
        cause = self.failures[0] if self.ending is None and self.failures else self.cause
        return News(rows, self.groups, self.under_way, self.stop, self.ending, cause)

    def train_controller(self) -> Any:
        """The actor in which Ray Train watches the workers; None before it is there."""
        return self.controller

    # ---- from `ray-finetune stop` ----

    def ask_to_stop(self) -> None:
        self.stop = True

    def has_ended(self) -> bool:
        return self.ending is not None

    # ---- from the workers ----

    def begin(self) -> None:
        self.groups += 1

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if "step" in row:
            self.failures = []  # those before it were mended

    def leaving(self) -> bool:
        """Whether the workers shall save and leave."""
        return self.stop or self.resizing

    def failed(self, cause: str) -> None:
        self.failures.append(cause)

    def end(self, ending: str, cause: str | None) -> None:
        if ending == "interrupted" and self.resizing and not self.stop:
            self.parted = True  # to begin anew in another number
        else:
            self.ending, self.cause = ending, cause

    # ---- from Ray Train's controller ----

    def set_train_controller(self, controller: Any) -> None:
        self.controller = controller

    def set_under_way(self, under_way: bool) -> None:
        self.under_way = under_way

    def set_resizing(self, resizing: bool) -> None:
        self.resizing, self.parted = resizing, False

    def has_parted(self) -> bool:
        """Whether the workers have left for a resize, or never will."""
        return self.parted or self.ending is not None or bool(self.failures)


def control() -> Any:
    """The run's Control; ValueError where there is none."""
    return ray.get_actor(Control.NAME, namespace=Control.NAME)
