#!/usr/bin/env bash
# Moves environment $1 to the released version $2, in its environment.yaml. With --pull-request as $3, on a branch of its own and
# as a pull request; that needs gh, and GH_TOKEN with contents: write and pull-requests: write.
set -euo pipefail

environment=$1
version=$2
file=environments/$environment/environment.yaml
[[ -f "$file" ]] || { echo "There is no $file: ENV names a folder under environments/." >&2; exit 2; }
[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || { echo "$version is no version; write one like 0.2.0." >&2; exit 2; }
sed -i "s/^chartVersion: .*/chartVersion: $version/" "$file"
if git diff --quiet -- "$file"; then
  echo "$environment has $version already."
  exit
fi
echo "$file now has $version."
[[ "${3:-}" == --pull-request ]] || exit 0

branch=promote-$environment-$version
title="$environment runs $version"
git checkout -b "$branch"
git -c user.name=github-actions -c user.email=github-actions@users.noreply.github.com commit --quiet --message "$title" -- "$file"
gh auth setup-git
git push --set-upstream origin "$branch"
gh pr create --base main --head "$branch" --title "$title" \
  --body "Made by the release of $version. When this has run well, move production by hand: make promote ENV=production"
