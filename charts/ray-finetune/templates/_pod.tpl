{{- /*
The pod of the head and of a worker: (dict "root" $ "role" "head" or "worker" "run" NAME "node" NODE). An empty run
name renders the pod that the run's hash is taken of.
*/ -}}

{{- define "ray-finetune.podMetadata" -}}
labels:
  {{- with .root.Values.podLabels }}
  {{- include "ray-finetune.stringMap" . | nindent 2 }}
  {{- end }}
  app.kubernetes.io/component: {{ .role }}
  {{- include "ray-finetune.selectorLabels" .root | nindent 2 }}
  ray-finetune.io/run: {{ .run | quote }}
{{- /* Consolidation would end a run to save a node. */}}
{{- $annotations := dict "karpenter.sh/do-not-disrupt" true }}
{{- if eq .role "worker" }}
{{- range $level, $key := dict "required" "requiredTopology" "preferred" "preferredTopology" }}
{{- with get $.root.Values.queue $key }}
{{- $_ := set $annotations (printf "kueue.x-k8s.io/podset-%s-topology" $level) . }}
{{- end }}
{{- end }}
{{- end }}
annotations: {{- include "ray-finetune.stringMap" (mergeOverwrite $annotations .root.Values.podAnnotations) | nindent 2 }}
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
  {{- if eq (include "ray-finetune.claimsEfa" .) "true" }}
  resourceClaims:
    - {name: efa, resourceClaimTemplateName: {{ include "ray-finetune.claimTemplateName" . | quote }}}
  {{- end }}
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
      {{- /* A drained head gets no other notice: the pod's SIGTERM goes to `ray start`, not to the driver beside it. */}}
      lifecycle:
        preStop:
          exec:
            command: [ray-finetune, stop, --wait]
      {{- end }}
      resources: {{- include "ray-finetune.resources" . | nindent 8 }}
      securityContext: {{- include "ray-finetune.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        {{- /* One file, not the folder: the image keeps a script there. */}}
        - {name: run, mountPath: /etc/ray-finetune/run.json, subPath: run.json, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: ray, mountPath: /tmp/ray}
        - {name: cache, mountPath: /cache}
        {{- /* Where nothing is mounted on /dev/shm, the operator mounts memory there, as large as the limit. */}}
        {{- if and $worker $values.workers.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
  volumes: {{- include "ray-finetune.volumes" . | nindent 4 }}
{{- end -}}
