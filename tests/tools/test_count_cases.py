"""`make cases` counts what hypothesis reports."""

import count_cases
import pytest

REPORT = """
tests/chart/test_a.py::test_any_name_is_kept:

  - during reuse phase (0.10 seconds):
    - 2 passing, 0 failing, and 0 invalid test cases
  - during generate phase (4.16 seconds):
    - Typical runtimes: ~ 81-798 ms, of which ~ 0-78 ms in data generation
    - 1000 passing, 0 failing, and 12 invalid test cases

tests/chart/test_a.py::test_any_key_is_refused:

  - during generate phase (1.22 seconds):
    - 7 passing, 0 failing, and 0 invalid test cases
"""


def test_the_cases_of_each_property_are_added_up_over_all_phases():
    assert count_cases.counts(REPORT) == {"test_any_name_is_kept": (1002, 12), "test_any_key_is_refused": (7, 0)}


def test_a_report_that_cannot_be_read_is_an_error(monkeypatch):
    monkeypatch.setattr(count_cases, "unit_cases", lambda: (1, 1))
    monkeypatch.setattr(count_cases, "property_cases", lambda examples: count_cases.counts("other words"))
    with pytest.raises(SystemExit, match="no property test was counted"):
        count_cases.main(1)
