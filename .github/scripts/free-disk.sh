#!/usr/bin/env bash
# Makes room on a GitHub runner for the Ray Train DLC, which unpacks to more than a fresh runner has free. Never run it on a
# machine that you want to keep.
set -euo pipefail

[[ "${GITHUB_ACTIONS:-}" == true ]] || { echo "Only for GitHub's runners." >&2; exit 1; }
sudo rm -rf /usr/local/lib/android /usr/share/dotnet /usr/share/swift /opt/ghc /usr/local/.ghcup /opt/hostedtoolcache/CodeQL
sudo docker system prune --all --force --volumes
df -h /
