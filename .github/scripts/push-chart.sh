#!/usr/bin/env bash
# Pushes the packaged chart in dist/ to the OCI registry $1 (oci://host/path), and writes its digest to GITHUB_OUTPUT where
# that is set. Log in to the registry first. What follows $1 goes to helm push.
set -euo pipefail

result=$(.tools/bin/helm push dist/ray-finetune-*.tgz "$@" 2>&1) || { echo "$result" >&2; exit 1; }
echo "$result"
digest=$(sed -n 's/^Digest: *//p' <<<"$result")
[[ "$digest" == sha256:* ]] || { echo "helm push printed no digest." >&2; exit 1; }
echo "digest=$digest" >>"${GITHUB_OUTPUT:-/dev/null}"
