"""Which evaluation is the best so far, and when so many were no better that training ends.

A pure function of the rows it is shown, so that a resumed run decides as an uninterrupted one; its state goes with
every checkpoint. All ranks see the same figures and decide alike.
"""

import math
from typing import Any

from trainer.config import BestConfig


class Best:
    """The best of the evaluations shown to `note`. With no `config` none is looked for, and nothing ever ends."""

    def __init__(self, config: BestConfig | None, state: dict[str, Any]):
        self.config = config
        self.step: int | None = state.get("step")
        self.value: float | None = state.get("value")
        self.noted: int = state.get("noted", 0)  # the newest step that was shown; before the first there is nothing to keep
        self.worse: int = state.get("worse", 0)  # evaluations in a row since that were no better

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for `__init__` of a resumed run."""
        return {"step": self.step, "value": self.value, "noted": self.noted, "worse": self.worse}

    @property
    def facts(self) -> dict[str, Any]:
        """What the run's records say of it."""
        return {"metric": self.config and self.config.metric, "step": self.step, "value": self.value}

    def note(self, row: dict[str, Any]) -> None:
        """Takes a row of held-out figures into account, once."""
        if self.config is None or row["step"] <= self.noted:
            return
        value, self.noted = row[self.config.metric], row["step"]
        gain = math.inf if self.value is None else value - self.value if self.config.rises else self.value - value
        if gain > self.config.min_delta:
            self.step, self.value, self.worse = row["step"], value, 0
        else:
            self.worse += 1

    def misses(self, step: int, every_steps: int | None) -> bool:
        """Whether `step`, which the run resumes after, should have been evaluated and was not."""
        return self.config is not None and every_steps is not None and step % every_steps == 0 and self.noted < step

    @property
    def ends(self) -> bool:
        """Whether `patience` evaluations in a row were no better."""
        return self.config is not None and self.config.patience is not None and self.worse >= self.config.patience
