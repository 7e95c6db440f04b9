{{- /* What PodMonitor, rules and dashboard share. Ray's series carry the run's name by the PodMonitor's podTargetLabels. */ -}}

{{- define "ray-finetune.monitoringLabels" -}}
{{- with .Values.monitoring.labels -}}
{{ include "ray-finetune.stringMap" . }}
{{ end -}}
{{- include "ray-finetune.labels" . -}}
{{- end -}}

{{- /* The release's runs: its name and eight digits of hash. */ -}}
{{- define "ray-finetune.runPattern" -}}
{{- include "ray-finetune.fullname" . }}-[0-9a-f]{8}
{{- end -}}

{{- define "ray-finetune.raySelector" -}}
namespace="{{ .Release.Namespace }}",ray_finetune_io_run=~"{{ include "ray-finetune.runPattern" . }}"
{{- end -}}

{{- define "ray-finetune.jobSelector" -}}
namespace="{{ .Release.Namespace }}",name=~"{{ include "ray-finetune.runPattern" . }}"
{{- end -}}
