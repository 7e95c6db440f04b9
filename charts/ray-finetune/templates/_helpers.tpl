{{- /* Names, labels and the image. Every object of a release is named after `ray-finetune.fullname`. */ -}}

{{- define "ray-finetune.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /*
The release's name, made a DNS-1035 label of at most 38 characters: KubeRay allows a RayJob 47, and "-" with the
eight digits of the run's hash come behind. What had to be changed to fit gets a hash of the original, so that two
long names, or `a.b` and `a-b`, stay two names.
*/ -}}
{{- define "ray-finetune.fullname" -}}
{{- $wanted := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $wanted = .Values.fullnameOverride -}}
{{- else if .Values.nameOverride -}}
{{- $wanted = printf "%s-%s" .Release.Name .Values.nameOverride -}}
{{- end -}}
{{- $clean := regexReplaceAll "[^a-z0-9-]" (lower $wanted) "-" | trimAll "-" -}}
{{- if not (regexMatch "^[a-z]" $clean) -}}
{{- $clean = printf "r-%s" $clean -}}
{{- end -}}
{{- if and (eq $clean $wanted) (le (len $clean) 38) -}}
{{- $clean -}}
{{- else -}}
{{- printf "%s-%s" ($clean | trunc 31 | trimSuffix "-") (sha256sum $wanted | trunc 6) -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ray-finetune.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* What selects a release's pods. KubeRay owns app.kubernetes.io/name on its pods: its head Service selects by it. */ -}}
{{- define "ray-finetune.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
ray-finetune.io/name: {{ include "ray-finetune.fullname" . | quote }}
{{- end -}}

{{- define "ray-finetune.labels" -}}
app.kubernetes.io/name: {{ include "ray-finetune.name" . | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{ include "ray-finetune.selectorLabels" . }}
{{- end -}}

{{- define "ray-finetune.image" -}}
{{- .Values.image.repository -}}
{{- if or .Values.image.tag (not .Values.image.digest) -}}
:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- with .Values.image.digest -}}
@{{ . }}
{{- end -}}
{{- end -}}

{{- /* A scalar as the text it was written as: Go prints 1000000 as 1e+06, JSON does not. */ -}}
{{- define "ray-finetune.text" -}}
{{- if kindIs "string" . -}}{{- . -}}{{- else -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{- /* A map whose values Kubernetes wants as strings: labels, annotations, node selectors. */ -}}
{{- define "ray-finetune.stringMap" -}}
{{- $lines := list -}}
{{- range $key, $value := . -}}
{{- $lines = append $lines (printf "%s: %s" (quote $key) (include "ray-finetune.text" $value | quote)) -}}
{{- end -}}
{{- join "\n" $lines -}}
{{- end -}}
