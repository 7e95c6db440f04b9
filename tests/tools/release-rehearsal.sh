#!/usr/bin/env bash
# The release of this commit, from tag to chart, to a registry on this machine: `make release-rehearsal`.
#
# It runs the scripts that .github/workflows/release.yaml runs. In place of what needs GitHub or the Ray Train DLC: a key of its own
# signs, and the image is one layer with the trainer's wheel. PORT is the registry's, 5055 unless given.
set -euo pipefail
cd "$(dirname "$0")/../.."

registry=127.0.0.1:${PORT:-5055}
work=$(mktemp -d)
log() {
  echo "==> $*"
}
fail() {
  echo "$1" >&2
  exit 1
}
# Its output is what GitHub's steps hand to one another.
output() {
  sed -n "s/^$1=//p" "$GITHUB_OUTPUT" | tail -1
}
export GITHUB_OUTPUT=$work/output COSIGN_PASSWORD=rehearsal COSIGN_KEY=$work/cosign.key
export HELM_REGISTRY_CONFIG=$work/helm.json DOCKER_CONFIG=$work
touch "$GITHUB_OUTPUT"

version=$(make --silent version)
log "tag v$version"
make --silent version TAG="v$version" >/dev/null

log "a registry on $registry"
cat >"$work/registry.yaml" <<EOF
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $work/registry}}
http: {addr: "$registry"}
EOF
OTEL_TRACES_EXPORTER=none registry serve "$work/registry.yaml" >"$work/registry.log" 2>&1 &
server=$!
trap 'kill $server; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in {1..50}; do
  if crane catalog "$registry" >/dev/null 2>&1; then break; fi
  kill -0 $server 2>/dev/null || fail "The registry did not start: $(cat "$work/registry.log")"
  sleep 0.2
done

log "image, by digest"
tar --create --file "$work/layer.tar" --directory dist --transform 's,^,opt/ray-finetune/,' "ray_finetune-$version-py3-none-any.whl"
crane append --oci-empty-base --new_layer "$work/layer.tar" --new_tag "$registry/ray-finetune:$version" >/dev/null 2>&1
crane mutate "$registry/ray-finetune:$version" --label "org.opencontainers.image.version=$version" >/dev/null 2>&1
image=$registry/ray-finetune@$(crane digest "$registry/ray-finetune:$version")
echo "$image"

log "chart, by digest"
.github/scripts/push-chart.sh "oci://$registry/charts" --plain-http
chart=$registry/charts/ray-finetune@$(output digest)

log "signed, and verified by the key"
(cd "$work" && cosign generate-key-pair 2>/dev/null)
for reference in "$image" "$chart"; do
  .github/scripts/sign.sh "$reference" 2>"$work/sign.log" || fail "cosign sign: $(cat "$work/sign.log")"
  cosign verify --key "$work/cosign.pub" --insecure-ignore-tlog --output text "$reference" 2>/dev/null |
    sed -n 's/.*\(sha256:[0-9a-f]*\).*/signature holds for \1/p' | head -1 | grep . || fail "The signature of $reference does not hold."
done

log "a signature by another key is refused"
mkdir "$work/other" && (cd "$work/other" && cosign generate-key-pair 2>/dev/null)
! cosign verify --key "$work/other/cosign.pub" --insecure-ignore-tlog "$image" >/dev/null 2>"$work/verify.log" ||
  fail "A key that has signed nothing verifies the image."
sed -n 's/^Error: //p' "$work/verify.log" | head -1

log "a tag is not signed"
! .github/scripts/sign.sh "$registry/ray-finetune:$version" || fail "A tag was signed."

log "the chart comes back, with the version of image and wheel"
helm pull "oci://$registry/charts/ray-finetune" --version "$version" --plain-http --untar --untardir "$work" 2>&1 | sed "s,$registry,REGISTRY,"
app=$(helm show chart "$work/ray-finetune" | sed -n 's/^appVersion: //p')
label=$(crane config "$image" | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["config"]["Labels"]["org.opencontainers.image.version"])')
wheel=$(tar --to-stdout --extract --file "$work/layer.tar" --wildcards '*.whl' | .venv/bin/python -c '
import io, sys, zipfile
wheel = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read()))
print(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode())' | sed -n 's/^Version: //p')
echo "tag v$version, chart's appVersion $app, image $label, wheel $wheel"
[[ "$app" == "$version" && "$label" == "$version" && "$wheel" == "$version" ]] || fail "The versions differ."

log "what an environment would run"
helm template ray-finetune "$work/ray-finetune" --kube-version 1.34.0 --values environments/staging/values.yaml \
  --set "image.repository=${image%@*},image.digest=${image#*@}" >"$work/manifest.yaml"
grep --only-matching "image: .*$image.*" "$work/manifest.yaml" | sort | uniq --count

log "release notes"
.github/scripts/release-notes.sh "v$version" "$image" "$chart" >"$work/notes.md"
echo "$(wc -l <"$work/notes.md") lines, the last of them: $(tail -1 "$work/notes.md")"

log "staging moves to the next version, in a clone"
git clone --quiet . "$work/clone"
cp .github/scripts/promote.sh "$work/clone/.github/scripts/"
(cd "$work/clone" && .github/scripts/promote.sh staging 99.0.0 && git diff --stat --no-color -- environments)
log "rehearsed the release of $version"
