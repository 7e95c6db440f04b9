{{- /*
Where pods run: workers one a node and all in one zone, head and submitter on other nodes. Each begins on a new line,
indented as keys of a pod's spec, and may be empty.
*/ -}}

{{- define "ray-finetune.workerPlacement" -}}
{{- $workers := .root.Values.workers -}}
{{- $selector := dict -}}
{{- with $workers.instanceType -}}{{- $_ := set $selector "node.kubernetes.io/instance-type" . -}}{{- end -}}
{{- with $workers.zone -}}{{- $_ := set $selector "topology.kubernetes.io/zone" . -}}{{- end -}}
{{- with merge $selector $workers.nodeSelector }}
  nodeSelector: {{- include "ray-finetune.stringMap" . | nindent 4 }}
{{- end }}
{{- if $workers.instanceType }}
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "ray-finetune.runsWorkers" . | nindent 14 }}
    {{- /* EFA does not cross zones, and traffic that does is billed. A Kueue topology or a named zone says where. */}}
    {{- if and (gt (int $workers.nodes) 1) (not $workers.zone) (not .root.Values.queue.requiredTopology) }}
    podAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels: {{- include "ray-finetune.runsWorkers" . | nindent 14 }}
    {{- end }}
{{- end }}
{{- $tolerations := $workers.tolerations -}}
{{- if int .node.gpus -}}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- if int .node.efa -}}
{{- /* The key of the taint; the resource is vpc.amazonaws.com/efa. */ -}}
{{- $tolerations = append $tolerations (dict "key" "aws.amazon.com/efa" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "ray-finetune.runsWorkers" -}}
app.kubernetes.io/component: worker
ray-finetune.io/run: {{ .run | quote }}
{{- end -}}

{{- define "ray-finetune.imagePullSecrets" -}}
{{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "ray-finetune.headPlacement" -}}
{{- with .root.Values.head.nodeSelector }}
  nodeSelector: {{- include "ray-finetune.stringMap" . | nindent 4 }}
{{- end }}
{{- with .root.Values.workers.instanceType }}
  affinity:
    nodeAffinity:
      {{- /* On a worker's node it would take the CPUs and memory that the worker is sized for. */}}
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          preference:
            matchExpressions:
              - {key: node.kubernetes.io/instance-type, operator: NotIn, values: [{{ . | quote }}]}
{{- end }}
{{- with .root.Values.head.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}
