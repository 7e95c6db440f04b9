"""tests/REPORTS.md names tests that there are."""

import re
from pathlib import Path


def test_every_test_that_the_table_of_reports_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (Path(__file__).parents[1] / "REPORTS.md").read_text()))
    there = {
        name
        for path in Path(__file__).parents[1].glob("*/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 25
    assert named <= there
