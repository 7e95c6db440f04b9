#!/usr/bin/env bash
# Tries EFA and NCCL on the nodes that an environment's workers would get: `make efa-test ENV=staging`.
#
#   efa-test.sh ENVIRONMENT           applies the chart's EFA test, waits, prints its log, removes it; exit 1 where it fails
#   efa-test.sh --print ENVIRONMENT   prints what would be applied
#
# NAMESPACE, `ray-finetune-ENVIRONMENT` unless given, must exist; kubectl's current context says in which cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
  echo "$1" >&2
  exit 1
}

print=false
if [[ "${1:-}" == --print ]]; then
  print=true
  shift
fi
environment=${1:-}
values=environments/$environment/values.yaml
environments=$(cd environments && echo */values.yaml)
[[ -n "$environment" ]] || fail "Which environment's nodes? Write make efa-test ENV=NAME, with one of: ${environments//\/values.yaml/}."
[[ -f "$values" ]] || fail "There is no $values; ENV can be one of: ${environments//\/values.yaml/}."
namespace=${NAMESPACE:-ray-finetune-$environment}

manifest=$(helm template ray-finetune charts/ray-finetune --namespace "$namespace" --values "$values" --set efa.test=true) ||
  fail "EFA cannot be tried with $values, as helm says above."
if "$print"; then
  echo "$manifest"
  exit
fi
command -v kubectl >/dev/null || fail "kubectl is needed to try EFA in a cluster, and there is none on PATH (https://kubernetes.io/docs/tasks/tools)."

job=ray-finetune-efa-test
selector=batch.kubernetes.io/job-name=$job

on_cluster() {
  kubectl --namespace "$namespace" "$@"
}

# Complete or Failed; the Job has a deadline of its own, so it always ends.
wait_for_end() {
  local missed=0 ended
  while true; do
    if ended=$(on_cluster get job "$job" --output 'jsonpath={.status.conditions[?(@.status=="True")].type}'); then
      missed=0
      case " $ended " in
        *" Complete "*) return 0 ;;
        *" Failed "*) return 1 ;;
      esac
    elif ((++missed == 5)); then
      echo "The cluster does not say how $job is." >&2
      return 1
    fi
    sleep "${POLL_SECONDS:-5}"
  done
}

# Also after Ctrl-C: its pods hold GPUs.
trap 'on_cluster delete --filename - --ignore-not-found --wait=false <<<"$manifest"' EXIT
on_cluster apply --filename - <<<"$manifest"
echo "Waiting for a pod on each node of $environment to try EFA and NCCL."
status=0
wait_for_end || status=1
on_cluster get pods --selector "$selector" --output wide || true
on_cluster logs --selector "$selector" --prefix --tail -1 || true
if ((status)); then
  echo "EFA does not work on the nodes of $environment: the log above, or the pods' state, says why." >&2
else
  echo "EFA works on the nodes of $environment."
fi
exit "$status"
