{{- /* What a run's settings are checked with on a CPU: by `helm test`, and before a queued run asks for GPUs. */ -}}

{{- /*
The spec of a pod with the head's account, environment and room: (dict "root" $ "role" "check" or "test" "node" NODE
"configMap" NAME "command" LIST).
*/ -}}
{{- define "ray-finetune.checkPod" -}}
restartPolicy: Never
serviceAccountName: {{ include "ray-finetune.serviceAccountName" .root | quote }}
automountServiceAccountToken: false
{{- include "ray-finetune.imagePullSecrets" .root | replace "\n  " "\n" }}
{{- include "ray-finetune.headPlacement" . | replace "\n  " "\n" }}
securityContext: {{- include "ray-finetune.podSecurityContext" . | nindent 2 }}
containers:
  - name: {{ .role }}
    image: {{ include "ray-finetune.image" .root | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command:
      {{- range .command }}
      - {{ . | quote }}
      {{- end }}
    {{- include "ray-finetune.env" . | nindent 4 }}
    resources: {{- include "ray-finetune.resources" . | nindent 6 }}
    securityContext: {{- include "ray-finetune.containerSecurityContext" . | nindent 6 }}
    volumeMounts:
      - {name: run, mountPath: /etc/ray-finetune/run.json, subPath: run.json, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /cache}
volumes: {{- include "ray-finetune.volumes" . | nindent 2 }}
{{- end -}}

{{- /* Kueue starts all of a cluster at once, so what the driver would find out then must be found out before. */ -}}
{{- define "ray-finetune.checksFirst" -}}
{{- and (not (empty .Values.queue.name)) .Values.queue.check (not .Values.efa.test) -}}
{{- end -}}

{{- /* The weight orders what Helm, and Argo CD by PreSync waves, creates before the release's own objects. */ -}}
{{- define "ray-finetune.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
