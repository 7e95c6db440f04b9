#!/usr/bin/env bash
# Resolves the Dockerfile's base image to the digest that its tag has now, so that the image says exactly what it is built
# on. Prints the reference, and writes it to GITHUB_OUTPUT where that is set. Needs docker with buildx.
set -euo pipefail

tagged=$(sed -n 's/^ARG BASE_IMAGE=//p' image/Dockerfile)
digest=$(docker buildx imagetools inspect "$tagged" --format '{{.Manifest.Digest}}')
[[ "$digest" == sha256:* ]] || { echo "$tagged has no digest." >&2; exit 1; }
echo "$tagged@$digest"
echo "reference=$tagged@$digest" >>"${GITHUB_OUTPUT:-/dev/null}"
