#!/usr/bin/env bash
# Downloads the wheels of the locked requirements $1 into the folder $2, for the DLC's Python: the image's build itself then needs
# no network, nor the certificates that this machine reaches the index with.
set -euo pipefail
cd "$(dirname "$0")/.."

# pip takes each name for itself: manylinux_2_34 (Amazon Linux 2023) does not stand for those that are older.
platforms=()
for name in manylinux_2_{34,31,28,27,26,24,17,12,5} manylinux{2014,2010,1} linux; do
  platforms+=(--platform "${name}_x86_64")
done
mkdir -p "$2"
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
  --python-version 3.13 "${platforms[@]}" --requirement "$1" --dest "$2"
