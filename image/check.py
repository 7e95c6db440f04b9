"""Fails the image's build where installing the trainer would change the DLC, or the DLC doesn't satisfy the trainer.

    python image/check.py before    no package of requirements.txt is in the base image
    python image/check.py after     the trainer's requirements, and theirs in turn, are all met; its command starts

Run by the Dockerfile with the image's own Python; needs nothing that the DLC lacks.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

ADDED = [
    line.split("==")[0]
    for line in (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    if "==" in line and not line.startswith((" ", "#"))
]


def main() -> int:
    problems = replaced() if sys.argv[1] == "before" else unmet("ray-finetune")
    for problem in problems:
        print(f"image/check.py: {problem}", file=sys.stderr)
    if problems:
        return 1
    if sys.argv[1] == "before":
        return 0
    return subprocess.run([Path(sys.executable).parent / "ray-finetune", "--help"], stdout=subprocess.DEVNULL).returncode


def replaced() -> list[str]:
    return [
        f"{name} {found} is in the base image already: add it to image/base.txt and run make lock"
        for name in ADDED
        if (found := installed(name))
    ]


def unmet(root: str) -> list[str]:
    """What the trainer and the packages added for it need and don't find. How the DLC's packages agree is the DLC's own affair."""
    problems = []
    for owner in [root, *ADDED]:
        for text in distribution(owner).requires or []:
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            found = installed(needed.name)
            if found is None or not needed.specifier.contains(found, prereleases=True):
                problems.append(f"{owner} needs {needed.name}{needed.specifier}, and the image has {found or 'none'}")
    return problems


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
