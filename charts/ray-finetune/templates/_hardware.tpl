{{- /* What a worker node gives: the catalogue's figures, or the values that stand in for them. Checked in _validate.tpl. */ -}}

{{- /*
Room for what every EKS node runs beside the worker (CNI, kube-proxy, device plugins, log and metric agents): one CPU,
and 2 GiB with 2 % of the memory, since the catalogue's allocatable memory is an estimate. Amazon Linux sets 5128 huge
pages of 2 MiB aside on a node with EFA.
*/ -}}
{{- define "ray-finetune.usable" -}}
{{- $cpus := div (sub .alloc_cpu_m 1000) 1000 -}}
{{- $hugepages := gt (int .efa) 0 | ternary 10256 0 -}}
{{- $gib := div (sub .alloc_mem_mib (add 2048 (div .alloc_mem_mib 50) $hugepages)) 1024 -}}
{{- dict "cpu_m" (mul $cpus 1000) "memory_mib" (mul $gib 1024) | toJson -}}
{{- end -}}

{{- /* The catalogue's row of workers.instanceType; an empty map where there is none. */ -}}
{{- define "ray-finetune.catalogue" -}}
{{- $types := .Files.Get "files/instance-types.yaml" | fromYaml -}}
{{- get $types (default "" .Values.workers.instanceType) | default dict | toJson -}}
{{- end -}}

{{- /* One node, as a worker pod asks for it: gpus, gpu_memory_gib, efa, cpu_m, memory_mib. */ -}}
{{- define "ray-finetune.node" -}}
{{- $workers := .Values.workers -}}
{{- $row := include "ray-finetune.catalogue" . | fromJson -}}
{{- $node := dict "gpus" 0 "efa" 0 "cpu_m" 0 "memory_mib" 0 "gpu_memory_gib" $workers.gpuMemoryGiB -}}
{{- if $row -}}
{{- $usable := include "ray-finetune.usable" $row | fromJson -}}
{{- $_ := set $node "gpu_memory_gib" $row.gpu_mem_gib -}}
{{- $_ := set $node "gpus" $row.gpu_count -}}
{{- $_ := set $node "cpu_m" $usable.cpu_m -}}
{{- $_ := set $node "memory_mib" $usable.memory_mib -}}
{{- /* Nothing crosses the network on one node, and an interface asked for in vain is one more thing to wait for. */ -}}
{{- if or (gt (int $workers.nodes) 1) .Values.efa.required -}}
{{- $_ := set $node "efa" $row.efa -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $workers.gpus) -}}{{- $_ := set $node "gpus" $workers.gpus -}}{{- end -}}
{{- if not (kindIs "invalid" $workers.efa) -}}{{- $_ := set $node "efa" $workers.efa -}}{{- end -}}
{{- if not (kindIs "invalid" $workers.cpu) -}}
{{- $_ := set $node "cpu_m" (include "ray-finetune.millicpu" $workers.cpu | int64) -}}
{{- end -}}
{{- if $workers.memory -}}{{- $_ := set $node "memory_mib" (include "ray-finetune.mebibytes" $workers.memory | int64) -}}{{- end -}}
{{- if not (int $node.gpus) -}}{{- $_ := set $node "gpu_memory_gib" nil -}}{{- end -}}
{{- $node | toJson -}}
{{- end -}}

{{- /* EFA must carry the traffic: as efa.required says, or by itself where several nodes have it. */ -}}
{{- define "ray-finetune.efaRequired" -}}
{{- $node := include "ray-finetune.node" . | fromJson -}}
{{- if kindIs "invalid" .Values.efa.required -}}
{{- and (gt (int $node.efa) 0) (gt (int .Values.workers.nodes) 1) -}}
{{- else -}}
{{- .Values.efa.required -}}
{{- end -}}
{{- end -}}

{{- /* Workers come from zero when the driver asks; Kueue admits a whole cluster or none, and refuses an autoscaled one. */ -}}
{{- define "ray-finetune.autoscaled" -}}
{{- empty .Values.queue.name -}}
{{- end -}}

{{- /* `hardware` of run.json; its keys are trainer/config.py's. */ -}}
{{- define "ray-finetune.hardware" -}}
{{- $node := include "ray-finetune.node" . | fromJson -}}
{{- $perNode := max 1 (int $node.gpus) -}}
{{- dict
  "instance_type" .Values.workers.instanceType
  "nodes" (int .Values.workers.nodes)
  "workers" (mul (int .Values.workers.nodes) $perNode)
  "min_workers" (kindIs "invalid" .Values.workers.minNodes | ternary nil (mul (int .Values.workers.minNodes) $perNode))
  "gpus_per_node" (int $node.gpus)
  "gpu_memory_gib" $node.gpu_memory_gib
  "efa_per_node" (int $node.efa)
  "efa_required" (include "ray-finetune.efaRequired" . | eq "true")
  "cpus_per_worker" (max 1 (div (int64 $node.cpu_m) (mul 1000 $perNode)))
  "autoscaled" (include "ray-finetune.autoscaled" . | eq "true")
  "grace_seconds" (int .Values.lifecycle.terminationGracePeriodSeconds)
| toJson -}}
{{- end -}}

{{- /* The same facts for the head, which takes no GPU and no EFA but sets Ray's variables by them. */}}
{{- define "ray-finetune.headNode" -}}
{{- $node := include "ray-finetune.node" . | fromJson -}}
{{- $head := .Values.head -}}
{{- dict "gpus" $node.gpus "efa" $node.efa "cpu_m" (include "ray-finetune.millicpu" $head.cpu) "memory_mib" (include "ray-finetune.mebibytes" $head.memory) | toJson -}}
{{- end -}}
