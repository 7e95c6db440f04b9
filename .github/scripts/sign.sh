#!/usr/bin/env bash
# Signs the image or chart $1, a reference with a digest, by cosign. On GitHub without a key: by the workflow's own identity, into
# Sigstore's public log. With COSIGN_KEY, a key file whose password is COSIGN_PASSWORD, no log and no network but the registry.
set -euo pipefail

[[ "$1" == *@sha256:* ]] || { echo "Only a digest is signed, and $1 has none: a tag may move." >&2; exit 2; }
if [[ -n "${COSIGN_KEY:-}" ]]; then
  options=(--key "$COSIGN_KEY" --use-signing-config=false --tlog-upload=false)
else
  options=(--yes)
fi
.tools/bin/cosign sign "${options[@]}" "$1"
