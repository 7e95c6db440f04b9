# shellcheck shell=bash
# Every bash that runs a script or `-c` reads this file first (BASH_ENV). It does what the DLC's entry point does, which
# KubeRay leaves out: where the host's NVIDIA driver is older than the CUDA in the image, the newer user-space driver in
# /usr/local/cuda/compat goes first in LD_LIBRARY_PATH. It starts no process, prints nothing and leaves nothing else behind.

ray_finetune_cuda_compat() {
  local compat="${CUDA_HOME:-/usr/local/cuda}/compat"
  local driver_file="${NVIDIA_DRIVER_VERSION_FILE:-/proc/driver/nvidia/version}"
  [[ ":${LD_LIBRARY_PATH:-}:" != *":$compat:"* ]] || return 0
  # libcuda.so.1 is a link to libcuda.so.580.95.05: the name of what it links to is its version.
  local library version host=() image=()
  [[ -r "$driver_file" && -e "$compat/libcuda.so.1" ]] || return 0
  local pattern='([0-9]{3,})\.([0-9]+)(\.([0-9]+))?'
  local line
  IFS= read -r line <"$driver_file" || [[ -n "$line" ]] || return 0
  [[ "$line" =~ $pattern ]] || return 0
  host=("${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]:-0}")
  for library in "$compat"/libcuda.so.*.*; do
    [[ "$library" -ef "$compat/libcuda.so.1" ]] && version="${library##*/libcuda.so.}"
  done
  [[ "${version:-}" =~ $pattern ]] || return 0
  image=("${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]:-0}")
  local part
  for part in 0 1 2; do
    # 10#: "08" is no octal number.
    ((10#${host[part]} <= 10#${image[part]})) || return 0
    if ((10#${host[part]} < 10#${image[part]})); then
      export LD_LIBRARY_PATH="$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
      return 0
    fi
  done
}

ray_finetune_cuda_compat || true
unset -f ray_finetune_cuda_compat
