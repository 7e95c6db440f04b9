{{- /*
Kubernetes quantities as numbers and back. Written back in the API server's own form: anything else (1000m, 2048Gi)
is rewritten there, and Argo CD then shows a difference for ever.
*/ -}}

{{- /* "46", 46, 1.5 or "1500m" as thousandths of a CPU. */ -}}
{{- define "ray-finetune.millicpu" -}}
{{- $text := include "ray-finetune.text" . -}}
{{- if hasSuffix "m" $text -}}
{{- trimSuffix "m" $text -}}
{{- else -}}
{{- round (mulf (float64 $text) 1000) 0 | int64 -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.cpu" -}}
{{- $milli := int64 . -}}
{{- if mod $milli 1000 -}}{{- $milli -}}m{{- else -}}{{- div $milli 1000 -}}{{- end -}}
{{- end -}}

{{- /* "512Mi", "160Gi" or "2Ti" as MiB. */ -}}
{{- define "ray-finetune.mebibytes" -}}
{{- $units := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $length := sub (len .) 2 | int -}}
{{- mul (int64 (substr 0 $length .)) (get $units (substr $length -1 .)) -}}
{{- end -}}

{{- define "ray-finetune.memory" -}}
{{- $mib := int64 . -}}
{{- if not (mod $mib 1048576) -}}{{- div $mib 1048576 -}}Ti
{{- else if not (mod $mib 1024) -}}{{- div $mib 1024 -}}Gi
{{- else -}}{{- $mib -}}Mi
{{- end -}}
{{- end -}}
