"""What chart-testing's `ct lint` asks of the chart beside helm lint and yamllint, without ct: Chart.yaml and its version.

    python tests/chart/lint_chart.py

Chart.yaml must fit chart_schema.yaml, each maintainer must be reachable, and a chart that differs from the last release,
which is a tag, must have a higher version. Without such a tag it says that the version was not compared.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yamale
import yaml

ROOT = Path(__file__).parents[2]
CHART = "charts/ray-finetune"
SCHEMA = ROOT / "tests/chart/chart_schema.yaml"
# Not part of the package, as .helmignore says.
UNPACKAGED = ("tests", "ci", "README.md.gotmpl", "values.schema.tmpl.json")


def problems(root: Path) -> list[str]:
    file = root / CHART / "Chart.yaml"
    found = schema_problems(file)
    if not found:
        found = maintainer_problems(yaml.safe_load(file.read_text()))
    return found


def schema_problems(file: Path) -> list[str]:
    results = yamale.validate(yamale.make_schema(str(SCHEMA)), yamale.make_data(str(file)), _raise_error=False)
    return [f"{CHART}/Chart.yaml: {error}" for result in results for error in result.errors]


def maintainer_problems(chart: dict[str, Any]) -> list[str]:
    return [
        f"{CHART}/Chart.yaml: maintainer {one['name']} has neither email nor url: write one"
        for one in chart["maintainers"]
        if not one.get("email") and not one.get("url")
    ]


def version_problem(root: Path) -> tuple[str | None, str]:
    """(what is wrong with the version, or None; what was compared)"""
    tag = git(root, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    if tag is None:
        return None, "the version was not compared: no release's tag is in this repository's history, or in this clone"
    left_out = [f":(exclude){CHART}/{name}" for name in UNPACKAGED]
    changed = (git(root, "diff", "--name-only", tag, "--", CHART, *left_out) or "").split()
    now = yaml.safe_load((root / CHART / "Chart.yaml").read_text())["version"]
    before = yaml.safe_load(git(root, "show", f"{tag}:{CHART}/Chart.yaml") or "version: 0.0.0-0")["version"]
    if not changed or order(now) > order(before):
        return None, f"the version is {now}, and the chart of {tag} has {before}" + ("" if changed else ", with the same files")
    return (
        f"{CHART} differs from {tag} in {len(changed)} files, such as {changed[0]}, but its version is {now}: "
        f"raise it above {before} in Chart.yaml and pyproject.toml"
    ), ""


def git(root: Path, *arguments: str) -> str | None:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def order(version: str) -> tuple[list[int], bool, list[tuple[bool, int, str]]]:
    """As semver orders: a release is above its pre-releases, and their numbers are below their words."""
    release, _, pre = version.partition("-")
    words = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"\.", pre)] if pre else []
    return [int(part) for part in release.split(".")], not pre, words


def main() -> int:
    found = problems(ROOT)
    wrong, compared = version_problem(ROOT)
    for line in [*found, *([wrong] if wrong else [])]:
        print(line)
    if not found and not wrong:
        print(f"Chart.yaml is as chart-testing wants it; {compared}")
    return int(bool(found or wrong))


if __name__ == "__main__":
    sys.exit(main())
