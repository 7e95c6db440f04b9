#!/usr/bin/env bash
# Prints the version of pyproject.toml, which wheel, image and chart share. Fails where Chart.yaml says another, or where
# $1, a release's tag, isn't v<version> or has no section in CHANGELOG.md.
set -euo pipefail

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
for key in version appVersion; do
  found=$(sed -n "s/^$key: *\"\{0,1\}\([^\"]*\)\"\{0,1\}$/\1/p" charts/ray-finetune/Chart.yaml)
  [[ "$found" == "$version" ]] || { echo "Chart.yaml has $key $found, and pyproject.toml has $version: give them one version." >&2; exit 1; }
done
if [[ -n "${1:-}" ]]; then
  [[ "$1" == "v$version" ]] || { echo "The tag is $1, and pyproject.toml has $version: the tag must be v$version." >&2; exit 1; }
  grep -qE "^## \[?${version//./\\.}\]?( |$)" CHANGELOG.md || { echo "CHANGELOG.md has no section for $version." >&2; exit 1; }
fi
echo "$version"
echo "version=$version" >>"${GITHUB_OUTPUT:-/dev/null}"
