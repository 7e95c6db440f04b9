"""Runs the chart's helm-unittest cases and all property tests, and prints how many of each have passed.

python tests/tools/count_cases.py [EXAMPLES of each property test, 100 unless given]
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ray-finetune"


def unit_cases() -> tuple[int, int]:
    """(suites, cases)"""
    command = ["helm-unittest", "--strict", "--color=false", str(CHART)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = [re.search(rf"^{what}:\s+(\d+) passed, (\d+) total", result.stdout, re.MULTILINE) for what in ("Test Suites", "Tests")]
    if result.returncode or not all(found):
        sys.exit(result.stdout + result.stderr)
    return int(found[0][2]), int(found[1][2])  # type: ignore[index]


def property_cases(examples: int) -> dict[str, tuple[int, int]]:
    """Test -> (examples that passed, those that it could not use)."""
    # Only the files that have some: to collect the others, too, pytest would import Ray and much else.
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "@given(" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "--quiet", "--hypothesis-show-statistics", "-m", "hypothesis", *files]
    result = subprocess.run(
        [*command, "--timeout", "36000"],
        cwd=ROOT,
        env={**os.environ, "EXAMPLES": str(examples)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return counts(result.stdout)


def counts(statistics: str) -> dict[str, tuple[int, int]]:
    """Of hypothesis' report: a test's name, and below it what each phase has drawn."""
    found: dict[str, tuple[int, int]] = {}
    name = ""
    for line in statistics.splitlines():
        if test := re.match(r"\S+::(\w+)(\[.*\])?:$", line):
            name = test[1]
        elif drawn := re.search(r"- (\d+) passing\D+\d+ failing\D+(\d+) invalid", line):
            passed, unusable = found.get(name, (0, 0))
            found[name] = (passed + int(drawn[1]), unusable + int(drawn[2]))
    return found


def main(examples: int) -> None:
    suites, cases = unit_cases()
    print(f"helm-unittest: {cases} cases in {suites} suites")
    found = property_cases(examples)
    for name, (passed, unusable) in found.items():
        print(
            f"{passed:6,} {name.removeprefix('test_').replace('_', ' ')}"
            + (f" ({unusable:,} more were drawn that say nothing here)" if unusable else "")
        )
    if not found:
        sys.exit("no property test was counted: hypothesis' report reads otherwise than before")
    print(f"property tests: {sum(passed for passed, _ in found.values()):,} cases")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
