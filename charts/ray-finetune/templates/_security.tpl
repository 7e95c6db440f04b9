{{- /*
Pod Security "restricted" for every pod, but for workers that must lock memory: IPC_LOCK reaches only root.
*/ -}}

{{- define "ray-finetune.locksMemory" -}}
{{- and (eq .role "worker") .root.Values.efa.lockMemory -}}
{{- end -}}

{{- define "ray-finetune.podSecurityContext" -}}
{{- if eq (include "ray-finetune.locksMemory" .) "true" -}}
runAsUser: 0
{{- else -}}
runAsNonRoot: true
runAsUser: 1000
{{- end }}
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
  {{- if eq (include "ray-finetune.locksMemory" .) "true" }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}
