{{- /* What a Ray container asks for, and how a worker gets its EFA interfaces. */ -}}

{{- define "ray-finetune.resources" -}}
{{- /* Requests equal limits: extended resources ask for it, and the kubelet evicts a Guaranteed pod last. */ -}}
requests: {{- include "ray-finetune.amounts" . | nindent 2 }}
  {{- /* Without a limit: a run is better off with a full disk's error than without its pod. */}}
  {{- if and (eq .role "worker") .root.Values.workers.disk }}
  ephemeral-storage: {{ include "ray-finetune.mebibytes" .root.Values.workers.disk | include "ray-finetune.memory" }}
  {{- end }}
limits: {{- include "ray-finetune.amounts" . | nindent 2 }}
{{- if eq (include "ray-finetune.claimsEfa" .) "true" }}
claims:
  - name: efa
{{- end }}
{{- end -}}

{{- define "ray-finetune.amounts" -}}
cpu: {{ include "ray-finetune.cpu" .node.cpu_m | quote }}
memory: {{ include "ray-finetune.memory" .node.memory_mib }}
{{- if eq .role "worker" }}
{{- with int .node.gpus }}
nvidia.com/gpu: {{ . | quote }}
{{- end }}
{{- if and (int .node.efa) (eq .root.Values.efa.driver "devicePlugin") }}
vpc.amazonaws.com/efa: {{ int .node.efa | quote }}
{{- end }}
{{- with .root.Values.workers.hugepages2Mi }}
hugepages-2Mi: {{ include "ray-finetune.mebibytes" . | include "ray-finetune.memory" }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* With DRA the interfaces are devices of a claim, not an amount. */ -}}
{{- define "ray-finetune.claimsEfa" -}}
{{- and (eq .role "worker") (gt (int .node.efa) 0) (eq .root.Values.efa.driver "dra") -}}
{{- end -}}

{{- /* A claim template cannot be edited, so another number of interfaces is another template. */ -}}
{{- define "ray-finetune.claimTemplateName" -}}
{{- include "ray-finetune.fullname" .root }}-efa-{{ int .node.efa }}
{{- end -}}
