"""Makes torch's CUDA wheel work on a machine without CUDA's libraries, which are several GB: `no_cuda.py TORCH/lib`.

There is no CPU wheel of torch on PyPI, and this one does not load without the libraries that it is linked to. Each gets a
stand-in there, in which every function answers 100, CUDA's code for "no device", or says so in words: torch then finds no GPU and
uses the CPU.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# What Linux itself or the wheel brings.
PRESENT = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libgomp|ld-linux-x86-64|libtorch\w*|libc10\w*|libshm)\.so"
)
ANY = "libcudart.so.13"  # where a function without a version goes: it is looked for in all libraries


def main() -> None:
    folder = Path(sys.argv[1])
    versions: dict[str, str] = {}  # by library, what its functions' version is called: mostly its own name
    functions: dict[str, set[str]] = {}  # by version
    for library in folder.glob("lib*.so"):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--dynamic", library)):
            if not PRESENT.match(name):
                versions.setdefault(name, name)
        needed = re.findall(r"File: (\S+) .*\n.*Name: (\S+)", output("readelf", "--wide", "--version-info", library))
        versions |= {name: version for name, version in needed if name in versions}
        symbols = re.findall(r" U ((?:__)?(?:cu|nccl|nv)\w+)(?:@(\S+))?$", output("nm", "-D", "-u", library), re.MULTILINE)
        for function, version in symbols:
            functions.setdefault(version or ANY, set()).add(function)
    for name, version in versions.items():
        build(folder / name, version, sorted(functions.get(version, ())))


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def build(library: Path, version: str, functions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "functions.c"), Path(folder, "versions")
        source.write_text("".join(map(stand_in, functions)))
        script.write_text(f"{version} {{ *; }};\n")
        options = ["-shared", "-fPIC", "-w", f"-Wl,--soname={library.name},--version-script={script}"]
        subprocess.run(["gcc", *options, "-o", library, source], check=True)


def stand_in(function: str) -> str:
    says = re.search("String|Name", function)
    return f'const char *{function}(void) {{ return "no device"; }}\n' if says else f"int {function}(void) {{ return 100; }}\n"


if __name__ == "__main__":
    main()
