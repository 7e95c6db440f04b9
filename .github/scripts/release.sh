#!/usr/bin/env bash
# Publishes the GitHub release of tag $1 with its section of CHANGELOG.md and the image's reference $2, and attaches what is
# in dist/. Needs gh, and GH_TOKEN with contents: write.
set -euo pipefail

tag=$1
image=$2
{
  awk -v version="${tag#v}" '
    /^## / { inside = ($2 == version || $2 == "[" version "]"); next }
    inside' CHANGELOG.md
  printf '\nImage: %s\n' "$image"
} >dist/notes.md
gh release create "$tag" --verify-tag --title "$tag" --notes-file dist/notes.md dist/*.whl dist/*.tgz
