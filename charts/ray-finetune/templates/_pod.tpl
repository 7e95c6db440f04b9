{{- /*
The pod of the head and of a worker: (dict "root" $ "role" "head" or "worker" "run" NAME "node" NODE). An empty run
name renders the pod that the run's hash is taken of.
*/ -}}

{{- define "ray-finetune.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "ray-finetune.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "ray-finetune.podMetadata" -}}
labels:
  {{- with .root.Values.podLabels }}
  {{- include "ray-finetune.stringMap" . | nindent 2 }}
  {{- end }}
  app.kubernetes.io/component: {{ .role }}
  {{- include "ray-finetune.selectorLabels" .root | nindent 2 }}
  ray-finetune.io/run: {{ .run | quote }}
annotations:
  {{- with .root.Values.podAnnotations }}
  {{- include "ray-finetune.stringMap" . | nindent 2 }}
  {{- end }}
  {{- /* Consolidation would end a run to save a node. */}}
  karpenter.sh/do-not-disrupt: "true"
  {{- if eq .role "worker" }}
  {{- range $level, $key := dict "required" "requiredTopology" "preferred" "preferredTopology" }}
  {{- with get $.root.Values.queue $key }}
  kueue.x-k8s.io/podset-{{ $level }}-topology: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "ray-finetune.pod" -}}
{{- $values := .root.Values -}}
{{- $worker := eq .role "worker" -}}
metadata: {{- include "ray-finetune.podMetadata" . | nindent 2 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "ray-finetune.serviceAccountName" .root | quote }}
  {{- /* Only Ray's autoscaler, beside the head, talks to the API server. IRSA and Pod Identity bring their own token. */}}
  automountServiceAccountToken: {{ and (not $worker) (eq (include "ray-finetune.autoscaled" .root) "true") }}
  {{- include "ray-finetune.imagePullSecrets" .root }}
  terminationGracePeriodSeconds: {{ $values.lifecycle.terminationGracePeriodSeconds | int }}
  {{- include (printf "ray-finetune.%sPlacement" .role) . }}
  securityContext: {{- include "ray-finetune.podSecurityContext" . | nindent 4 }}
  containers:
    - name: ray-{{ .role }}
      image: {{ include "ray-finetune.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- include "ray-finetune.env" . | nindent 6 }}
      {{- if not $worker }}
      {{- /* All that is served; Ray's client port, which the operator would add, is not. */}}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: metrics, containerPort: 8080}
      {{- end }}
      resources: {{- include "ray-finetune.resources" . | nindent 8 }}
      securityContext: {{- include "ray-finetune.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        - {name: run, mountPath: /etc/ray-finetune, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: ray, mountPath: /tmp/ray}
        - {name: cache, mountPath: /cache}
        {{- /* Where nothing is mounted on /dev/shm, the operator mounts memory there, as large as the limit. */}}
        {{- if and $worker $values.workers.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
  volumes: {{- include "ray-finetune.volumes" . | nindent 4 }}
{{- end -}}

{{- define "ray-finetune.resources" -}}
{{- /* Requests equal limits: extended resources ask for it, and the kubelet evicts a Guaranteed pod last. */ -}}
requests: {{- include "ray-finetune.amounts" . | nindent 2 }}
limits: {{- include "ray-finetune.amounts" . | nindent 2 }}
{{- end -}}

{{- define "ray-finetune.amounts" -}}
cpu: {{ include "ray-finetune.cpu" .node.cpu_m | quote }}
memory: {{ include "ray-finetune.memory" .node.memory_mib }}
{{- if eq .role "worker" }}
{{- with int .node.gpus }}
nvidia.com/gpu: {{ . | quote }}
{{- end }}
{{- with int .node.efa }}
vpc.amazonaws.com/efa: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "ray-finetune.volumes" -}}
- name: run
  configMap:
    name: {{ include "ray-finetune.configMapName" .root }}
- name: tmp
  emptyDir: {}
- name: ray
  emptyDir: {}
- name: cache
  {{- if .root.Values.modelCache.claim }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.modelCache.claim | quote }}
  {{- else }}
  emptyDir: {{- with .root.Values.modelCache.size }}
    sizeLimit: {{ include "ray-finetune.mebibytes" . | include "ray-finetune.memory" }}
    {{- else }} {}
    {{- end }}
  {{- end }}
{{- if and (eq .role "worker") .root.Values.workers.shm }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "ray-finetune.mebibytes" .root.Values.workers.shm | include "ray-finetune.memory" }}
{{- end }}
{{- end -}}
