{{- /* What a Ray pod mounts: the run file, room to write, the model cache and, where its size is set, /dev/shm. */ -}}

{{- define "ray-finetune.volumes" -}}
- name: run
  configMap:
    name: {{ default (include "ray-finetune.configMapName" .root) .configMap }}
- name: tmp
  emptyDir: {}
{{- if has .role (list "head" "worker") }}
- name: ray
  emptyDir: {}
{{- end }}
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
