{{- /*
What cannot work is refused here, with a sentence that names the key and the right figure. Types, bounds and spelling
are the schema's. Each check returns nothing or fails.
*/ -}}

{{- define "ray-finetune.validate" -}}
{{- include "ray-finetune.validateTrainer" . -}}
{{- include "ray-finetune.validateInstance" . -}}
{{- include "ray-finetune.validateNode" . -}}
{{- include "ray-finetune.validateEfa" . -}}
{{- include "ray-finetune.validateLifecycle" . -}}
{{- include "ray-finetune.validateQueue" . -}}
{{- include "ray-finetune.validatePods" . -}}
{{- include "ray-finetune.validateSecrets" . -}}
{{- end -}}

{{- define "ray-finetune.validateTrainer" -}}
{{- $uri := dig "storage" "uri" "" .Values.trainer -}}
{{- if not (hasPrefix "s3://" $uri) -}}
{{- fail (printf "trainer.storage.uri is %q, but pods keep nothing when they end: write the s3:// folder that runs are kept in" $uri) -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.validateInstance" -}}
{{- $workers := .Values.workers -}}
{{- $row := include "ray-finetune.catalogue" . | fromJson -}}
{{- if $row -}}
{{- if and $workers.gpuMemoryGiB (ne (float64 $workers.gpuMemoryGiB) (float64 $row.gpu_mem_gib)) -}}
{{- fail (printf "workers.gpuMemoryGiB is %v, but a GPU of %s has %v: leave it out" $workers.gpuMemoryGiB $workers.instanceType $row.gpu_mem_gib) -}}
{{- end -}}
{{- else -}}
{{- $missing := list -}}
{{- range $key := list "cpu" "memory" -}}
{{- if kindIs "invalid" (get $workers $key) -}}{{- $missing = append $missing (printf "workers.%s" $key) -}}{{- end -}}
{{- end -}}
{{- if and $workers.instanceType (kindIs "invalid" $workers.gpus) -}}{{- $missing = append $missing "workers.gpus (0 where it has none)" -}}{{- end -}}
{{- if and (gt (int $workers.gpus) 0) (not $workers.gpuMemoryGiB) -}}{{- $missing = append $missing "workers.gpuMemoryGiB" -}}{{- end -}}
{{- if and $missing $workers.instanceType -}}
{{- fail (printf "workers.instanceType is %s, which the chart does not know: write %s if that is meant, or add what it has as %s" $workers.instanceType (include "ray-finetune.nearestType" .) (join ", " $missing)) -}}
{{- else if $missing -}}
{{- fail (printf "%s must be set, since workers.instanceType is not set" (join ", " $missing)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The known type that has the most in common with workers.instanceType, from its beginning and from its end. */ -}}
{{- define "ray-finetune.nearestType" -}}
{{- $wanted := .Values.workers.instanceType -}}
{{- $best := dict "type" "" "common" -1 -}}
{{- range $type := .Files.Get "files/instance-types.yaml" | fromYaml | keys | sortAlpha -}}
{{- $length := min (len $type) (len $wanted) | int -}}
{{- $front := 0 -}}
{{- range until $length -}}
{{- if and (eq $front .) (eq (substr . (add1 . | int) $type) (substr . (add1 . | int) $wanted)) -}}{{- $front = add1 . | int -}}{{- end -}}
{{- end -}}
{{- $back := 0 -}}
{{- range until (sub $length $front | int) -}}
{{- $a := sub (len $type) (add1 .) | int -}}
{{- $b := sub (len $wanted) (add1 .) | int -}}
{{- if and (eq $back .) (eq (substr $a (add1 $a | int) $type) (substr $b (add1 $b | int) $wanted)) -}}{{- $back = add1 . | int -}}{{- end -}}
{{- end -}}
{{- $common := add $front $back | int -}}
{{- if gt $common $best.common -}}{{- $best = dict "type" $type "common" $common -}}{{- end -}}
{{- end -}}
{{- $best.type -}}
{{- end -}}

{{- /* Requests against the node's figures. */ -}}
{{- define "ray-finetune.validateNode" -}}
{{- $workers := .Values.workers -}}
{{- $node := include "ray-finetune.node" . | fromJson -}}
{{- $row := include "ray-finetune.catalogue" . | fromJson -}}
{{- if $row -}}
{{- $usable := include "ray-finetune.usable" $row | fromJson -}}
{{- if gt (int $node.gpus) (int $row.gpu_count) -}}
{{- fail (printf "workers.gpus is %d, but a %s has %d: write at most %d, or leave it out" (int $node.gpus) $workers.instanceType (int $row.gpu_count) (int $row.gpu_count)) -}}
{{- end -}}
{{- if gt (int $node.efa) (int $row.efa) -}}
{{- if not (int $row.efa) -}}
{{- fail (printf "workers.efa is %d, but a %s has no EFA interface: write 0, or leave it out" (int $node.efa) $workers.instanceType) -}}
{{- end -}}
{{- fail (printf "workers.efa is %d, but a %s has %d: write at most %d, or leave it out" (int $node.efa) $workers.instanceType (int $row.efa) (int $row.efa)) -}}
{{- end -}}
{{- if gt (int64 $node.cpu_m) (int64 $row.alloc_cpu_m) -}}
{{- fail (printf "workers.cpu is %s, but a %s leaves %s to pods: write at most %d, or leave it out for %s" (include "ray-finetune.cpu" $node.cpu_m) $workers.instanceType (include "ray-finetune.cpu" $row.alloc_cpu_m) (div $row.alloc_cpu_m 1000) (include "ray-finetune.cpu" $usable.cpu_m)) -}}
{{- end -}}
{{- if gt (int64 $node.memory_mib) (int64 $row.alloc_mem_mib) -}}
{{- fail (printf "workers.memory is %s, but a %s leaves %dMi to pods: write at most %dGi, or leave it out for %s" $workers.memory $workers.instanceType (int64 $row.alloc_mem_mib) (div $row.alloc_mem_mib 1024) (include "ray-finetune.memory" $usable.memory_mib)) -}}
{{- end -}}
{{- end -}}
{{- if gt (int $workers.minNodes) (int $workers.nodes) -}}
{{- fail (printf "workers.minNodes is %d, but workers.nodes is %d: write at most %d, or leave it out to wait for all" (int $workers.minNodes) (int $workers.nodes) (int $workers.nodes)) -}}
{{- end -}}
{{- if lt (int64 $node.cpu_m) (mul 1000 (int $node.gpus)) -}}
{{- fail (printf "workers.cpu is %s, but each of %d GPUs needs one CPU for its worker: write at least %d" (include "ray-finetune.cpu" $node.cpu_m) (int $node.gpus) (int $node.gpus)) -}}
{{- end -}}
{{- with $workers.hugepages2Mi -}}
{{- if mod (include "ray-finetune.mebibytes" .) 2 -}}
{{- fail (printf "workers.hugepages2Mi is %s, but pages are of 2Mi: write a multiple of 2Mi" .) -}}
{{- end -}}
{{- end -}}
{{- with $workers.shm -}}
{{- if gt (include "ray-finetune.mebibytes" . | int64) (int64 $node.memory_mib) -}}
{{- fail (printf "workers.shm is %s, but it is part of the pod's memory, which is %s: write less, or leave it out" . (include "ray-finetune.memory" $node.memory_mib)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
