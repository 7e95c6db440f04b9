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
{{- $why := "workers.instanceType is not set" -}}
{{- if $workers.instanceType -}}
{{- $types := .Files.Get "files/instance-types.yaml" | fromYaml | keys | sortAlpha -}}
{{- $family := regexFind "^[^.]*\\." $workers.instanceType -}}
{{- $near := list -}}
{{- range $types -}}{{- if hasPrefix $family . -}}{{- $near = append $near . -}}{{- end -}}{{- end -}}
{{- $why = printf "the chart does not know %s%s" $workers.instanceType ($near | join ", " | empty | ternary "" (printf " (it knows %s)" (join ", " $near))) -}}
{{- end -}}
{{- range $key := list "cpu" "memory" -}}
{{- if kindIs "invalid" (get $workers $key) -}}
{{- fail (printf "workers.%s must be set, since %s" $key $why) -}}
{{- end -}}
{{- end -}}
{{- if and $workers.instanceType (kindIs "invalid" $workers.gpus) -}}
{{- fail (printf "workers.gpus must be set, since %s: write its number of GPUs, or 0" $why) -}}
{{- end -}}
{{- if and (gt (int $workers.gpus) 0) (not $workers.gpuMemoryGiB) -}}
{{- fail (printf "workers.gpuMemoryGiB must be set, since %s" $why) -}}
{{- end -}}
{{- end -}}
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
{{- fail (printf "workers.efa is %d, but a %s has %d: write at most %d, or leave it out" (int $node.efa) $workers.instanceType (int $row.efa) (int $row.efa)) -}}
{{- end -}}
{{- if gt (int64 $node.cpu_m) (int64 $row.alloc_cpu_m) -}}
{{- fail (printf "workers.cpu is %s, but a %s leaves %s to pods: write at most %d, or leave it out for %s" (include "ray-finetune.cpu" $node.cpu_m) $workers.instanceType (include "ray-finetune.cpu" $row.alloc_cpu_m) (div $row.alloc_cpu_m 1000) (include "ray-finetune.cpu" $usable.cpu_m)) -}}
{{- end -}}
{{- if gt (int64 $node.memory_mib) (int64 $row.alloc_mem_mib) -}}
{{- fail (printf "workers.memory is %s, but a %s leaves %dMi to pods: write at most %dGi, or leave it out for %s" $workers.memory $workers.instanceType (int64 $row.alloc_mem_mib) (div $row.alloc_mem_mib 1024) (include "ray-finetune.memory" $usable.memory_mib)) -}}
{{- end -}}
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
