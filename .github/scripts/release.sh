#!/usr/bin/env bash
# Publishes the GitHub release of tag $1 with its notes, which name image $2 and chart $3, and attaches what is in dist/.
# Needs gh, and GH_TOKEN with contents: write.
set -euo pipefail

.github/scripts/release-notes.sh "$1" "$2" "$3" >dist/notes.md
gh release create "$1" --verify-tag --title "$1" --notes-file dist/notes.md dist/*.whl dist/*.tgz
