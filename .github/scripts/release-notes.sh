#!/usr/bin/env bash
# Prints the notes of the release of tag $1: its section of CHANGELOG.md, and the references of image $2 and chart $3.
set -euo pipefail

section=$(awk -v version="${1#v}" '
  /^## / { inside = ($2 == version || $2 == "[" version "]"); next }
  inside' CHANGELOG.md)
[[ -n "${section//[[:space:]]/}" ]] || { echo "CHANGELOG.md has no section for ${1#v}." >&2; exit 1; }
printf '%s\n\nImage: %s\n\nChart: %s\n' "$section" "$2" "$3"
