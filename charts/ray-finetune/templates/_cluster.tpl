{{- /* The RayCluster of a run, its submitter, and the hash that names the run. */ -}}

{{- define "ray-finetune.entrypoint" -}}
ray-finetune train --run /etc/ray-finetune/run.json
{{- end -}}

{{- define "ray-finetune.rayVersion" -}}
{{- index .Chart.Annotations "ray-finetune.io/ray-version" -}}
{{- end -}}

{{- /* (dict "root" $ "run" NAME); an empty run name renders what the run's hash is taken of. */ -}}
{{- define "ray-finetune.cluster" -}}
{{- $values := .root.Values -}}
{{- $node := include "ray-finetune.node" .root | fromJson -}}
{{- $headNode := include "ray-finetune.headNode" .root | fromJson -}}
{{- $autoscaled := include "ray-finetune.autoscaled" .root | eq "true" -}}
rayVersion: {{ include "ray-finetune.rayVersion" .root | quote }}
{{- /* With mode token the operator makes the Secret; one made by the chart would be deleted before the RayJob. */}}
authOptions:
  mode: {{ $values.auth.mode }}
{{- if $autoscaled }}
{{- /* No GPU node starts until the driver, on the head, has checked settings, data and storage. */}}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  {{- /* Longer than Ray Train takes to restart its workers after a failure. */}}
  idleTimeoutSeconds: 300
  imagePullPolicy: {{ $values.image.pullPolicy }}
  env:
    - {name: HOME, value: /tmp}
    - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
    {{- /* The operator adds it for mode token, and again if it were written here. */}}
    {{- if eq $values.auth.mode "disabled" }}
    - {name: RAY_AUTH_MODE, value: disabled}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {cpu: 500m, memory: 1Gi}
  securityContext: {{- include "ray-finetune.containerSecurityContext" (dict "root" .root "role" "autoscaler") | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: ray, mountPath: /tmp/ray}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: 0.0.0.0
    {{- /* The head never runs a training worker. */}}
    num-cpus: "0"
    num-gpus: "0"
  template: {{- include "ray-finetune.pod" (dict "root" .root "run" .run "role" "head" "node" $headNode) | nindent 4 }}
workerGroupSpecs:
  - groupName: workers
    replicas: {{ $autoscaled | ternary 0 (int $values.workers.nodes) }}
    minReplicas: {{ $autoscaled | ternary 0 (int $values.workers.nodes) }}
    maxReplicas: {{ int $values.workers.nodes }}
    rayStartParams:
      num-cpus: {{ max 1 (div (int64 $node.cpu_m) 1000) | quote }}
      num-gpus: {{ int $node.gpus | quote }}
    template: {{- include "ray-finetune.pod" (dict "root" .root "run" .run "role" "worker" "node" $node) | nindent 6 }}
{{- end -}}

{{- /* (dict "root" $ "run" NAME "role" "submitter"). Follows the driver's log, with KubeRay's small submitter, or with the whole training image where that is null. */ -}}
{{- define "ray-finetune.submitter" -}}
{{- $values := .root.Values -}}
metadata: {{- include "ray-finetune.podMetadata" . | nindent 2 }}
spec:
  {{- /* A network policy takes a moment to know a pod's address, and some refuse it until then: a new pod would come too early again. */}}
  restartPolicy: OnFailure
  automountServiceAccountToken: false
  {{- include "ray-finetune.imagePullSecrets" .root }}
  {{- include "ray-finetune.headPlacement" . }}
  securityContext: {{- include "ray-finetune.podSecurityContext" . | nindent 4 }}
  containers:
    - name: submitter
      {{- if $values.submitter.image }}
      image: {{ $values.submitter.image | quote }}
      command: [/submitter]
      args: {{- concat (list "--") (include "ray-finetune.entrypoint" . | splitList " ") | toYaml | nindent 8 }}
      {{- else }}
      image: {{ include "ray-finetune.image" .root | quote }}
      {{- end }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        - {name: HOME, value: /tmp}
        - {name: RAY_AUTH_MODE, value: {{ $values.auth.mode }}}
      resources:
        {{- /* The training image follows the log with Ray's own command, in Python. */}}
        {{- $memory := empty $values.submitter.image | ternary "1Gi" "128Mi" }}
        requests: {cpu: 100m, memory: {{ $memory | quote }}}
        limits: {cpu: "1", memory: {{ $memory | quote }}}
      securityContext: {{- include "ray-finetune.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: tmp
      emptyDir: {}
{{- end -}}
