{{- /*
Which run this is. KubeRay never runs an edited RayJob again, so what should run again must have another name: the
hash covers run.json, the cluster, the submitter, the queue and lifecycle.rerun. It leaves out labels, annotations,
deadlines and retries, which are edited in place, and the chart's version.
*/ -}}

{{- define "ray-finetune.runJson" -}}
{{- dict
  "trainer" .Values.trainer
  "hardware" (include "ray-finetune.hardware" . | fromJson)
  "release" (dict "name" (include "ray-finetune.fullname" .) "namespace" .Release.Namespace)
| toPrettyJson -}}
{{- end -}}

{{- /* `data` of a ConfigMap. A block reads well, and holds all characters but these as they are. */ -}}
{{- define "ray-finetune.runData" -}}
{{- $json := include "ray-finetune.runJson" . -}}
{{- if regexMatch "[\\x{7f}-\\x{9f}\\x{feff}\\x{fffe}\\x{ffff}]" $json -}}
run.json: {{ $json | quote }}
{{- else -}}
run.json: |-
  {{- $json | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.configMapName" -}}
{{- include "ray-finetune.fullname" . }}-{{ include "ray-finetune.runJson" . | sha256sum | trunc 8 }}
{{- end -}}

{{- define "ray-finetune.runName" -}}
{{- $nameless := dict "root" . "run" "" "role" "submitter" -}}
{{- $cluster := include "ray-finetune.cluster" $nameless | fromYaml -}}
{{- $submitter := include "ray-finetune.submitter" $nameless | fromYaml -}}
{{- $templates := list $cluster.headGroupSpec.template $submitter -}}
{{- range $cluster.workerGroupSpecs -}}{{- $templates = append $templates .template -}}{{- end -}}
{{- range $templates -}}{{- $_ := unset . "metadata" -}}{{- end -}}
{{- $identity := dict
  "entrypoint" (include "ray-finetune.entrypoint" .)
  "cluster" $cluster
  "submitter" $submitter
  "queue" (list .Values.queue.name .Values.queue.priorityClass .Values.queue.requiredTopology .Values.queue.preferredTopology)
  "rerun" .Values.lifecycle.rerun
-}}
{{- include "ray-finetune.fullname" . }}-{{ toJson $identity | sha256sum | trunc 8 }}
{{- end -}}
