"""Writes the locks from pyproject.toml: requirements.lock for this machine, image/requirements.txt for the image, and
tests/image/requirements.txt for the image's stand-in base.

    python tests/tools/lock.py [--upgrade | --check]

Versions that are locked stay, unless --upgrade is given. The image's lock has only what the Ray Train DLC lacks: what
image/base.txt lists is resolved at the DLC's versions and left out. The stand-in base has the rest, without CUDA.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = ROOT / ".venv/bin/uv"
LOCK = ROOT / "requirements.lock"
IMAGE_LOCK = ROOT / "image/requirements.txt"
IMAGE_BASE = ROOT / "image/base.txt"
STAND_IN_LOCK = ROOT / "tests/image/requirements.txt"
# The DLC's Python, the C library of Amazon Linux 2023, and the versions of the DLC.
DLC_ARGUMENTS = ["--python-version", "3.13", "--python-platform", "x86_64-manylinux_2_34", "--constraints", "image/base.txt"]


def main() -> int:
    # In this order: what the stand-in lacks is read from the image's lock.
    arguments = {LOCK: lambda: ["--group", "dev", "--universal"], IMAGE_LOCK: image_arguments, STAND_IN_LOCK: stand_in_arguments}
    if "--check" in sys.argv:
        stale = [path for path, options in arguments.items() if is_stale(path, options())]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what pyproject.toml gives; run make lock")
        return 1 if stale else 0
    for path, options in arguments.items():
        compile_lock(path, [*options(), *(["--upgrade"] if "--upgrade" in sys.argv else [])])
    return 0


def image_arguments() -> list[str]:
    return [*DLC_ARGUMENTS, *without(names(IMAGE_BASE))]


def stand_in_arguments() -> list[str]:
    cuda = [name for name in names(IMAGE_BASE) if name.startswith(("cuda-", "nvidia-", "triton"))]
    return [*DLC_ARGUMENTS, *without([*cuda, *names(IMAGE_LOCK)])]


def names(path: Path) -> list[str]:
    """The packages that a list of requirements has."""
    return re.findall(r"^([a-z][a-z0-9-]*)", path.read_text(), re.MULTILINE)


def without(packages: list[str]) -> list[str]:
    return [argument for name in packages for argument in ("--no-emit-package", name)]


def is_stale(path: Path, options: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / path.name
        fresh.write_bytes(path.read_bytes())
        compile_lock(fresh, options)
        return without_hashes(fresh) != without_hashes(path)


def without_hashes(path: Path) -> list[str]:
    """A version's files, and so its hashes, grow when wheels are added to an old release: that makes no lock stale."""
    return [line.rstrip(" \\") for line in path.read_text().splitlines() if "--hash" not in line]


def compile_lock(path: Path, options: list[str]) -> None:
    command = [UV, "pip", "compile", "pyproject.toml", "--quiet", "--system-certs", "--generate-hashes", "--no-emit-index-url"]
    header = ["--custom-compile-command", "make lock", "--output-file", str(path)]
    subprocess.run([*command, *options, *header], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    locked, _, _ = path.read_text().partition("\n# The following packages were excluded from the output:")
    path.write_text(locked)


if __name__ == "__main__":
    sys.exit(main())
