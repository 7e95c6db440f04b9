#!/usr/bin/env bash
# Builds ray-train-stand-in:latest, on which the image is built where the Ray Train DLC (many GB, CUDA) is not wanted: Debian trixie
# for its Python 3.13, and the DLC's packages in /opt/venv, in the DLC's versions. As root; a second run finds it there.
set -euo pipefail
cd "$(dirname "$0")/../.."

IMAGE=localhost/ray-train-stand-in:latest
WHEELS=.cache/stand-in-wheels
SITE=opt/venv/lib/python3.13/site-packages
export BUILDAH_ISOLATION=chroot

made_from=$(cat tests/image/build_base.sh tests/image/no_cuda.py tests/image/requirements.txt | sha256sum | cut -c 1-16)
found=$(buildah inspect --type image --format '{{index .OCIv1.Config.Labels "made-from"}}' "$IMAGE" 2>/dev/null || true)
[[ "$found" != "$made_from" ]] || exit 0

echo "Building $IMAGE"
image/wheels.sh tests/image/requirements.txt "$WHEELS"
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
root=$(buildah mount "$container")
# wget: with it, KubeRay's probes ask whether Ray is alive.
debootstrap --variant=minbase --include=python3,python3-venv,wget,ca-certificates trixie "$root" >.cache/stand-in.log
buildah run --volume "$PWD/$WHEELS:/wheels:ro" --volume "$PWD/tests/image/requirements.txt:/requirements.txt:ro" "$container" -- \
  bash -ec 'python3 -m venv /opt/venv
    /opt/venv/bin/pip install --quiet --no-deps --no-index --no-cache-dir --require-hashes --find-links /wheels --requirement /requirements.txt'
.venv/bin/python tests/image/no_cuda.py "$root/$SITE/torch/lib"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
buildah config --env PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin --env PYTHONUNBUFFERED=1 --env PYTHONDONTWRITEBYTECODE=1 \
  --workingdir /workspace --cmd bash --label "made-from=$made_from" "$container"
buildah commit --quiet "$container" "$IMAGE" >/dev/null
rm -rf "$WHEELS"
