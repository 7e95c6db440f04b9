"""Writes charts/ray-finetune/README.md from README.md.gotmpl and the comments in values.yaml, with helm-docs.

`<!-- manifest: FILE -->` becomes what that values file renders to, without blank lines.

python tests/chart/generate_readme.py [--check]
"""

import re
import subprocess
import sys

from chart import CHART, ROOT, helm_template, tool

README = CHART / "README.md"


def render() -> str:
    command = [
        tool("helm-docs"),
        "--dry-run",
        "--sort-values-order",
        "file",
        "--log-level",
        "error",
        "--chart-search-root",
        str(CHART),
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() + "\n"
    return re.sub(r"<!-- manifest: (\S+) -->", lambda match: manifest(match[1]), text)


def manifest(values: str) -> str:
    output = helm_template(ROOT / values, release="ray-finetune").stdout
    lines = [line for line in output.splitlines() if line and not line.startswith("# Source:")]
    return "```yaml\n" + "\n".join(lines) + "\n```"


def main() -> int:
    text = render()
    if "--check" not in sys.argv:
        README.write_text(text)
        return 0
    if README.exists() and README.read_text() == text:
        return 0
    print(f"{README} is out of date; run python tests/chart/generate_readme.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
