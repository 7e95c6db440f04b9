{{- /* The environment of every Ray container. `env` of values.yaml wins over what is set here; null there leaves it out. */ -}}

{{- define "ray-finetune.builtinEnv" -}}
{{- $root := .root -}}
{{- $grace := sub (int $root.Values.lifecycle.terminationGracePeriodSeconds) 15 -}}
HOME: /tmp
USER: ray-finetune
HF_HOME: /cache/huggingface
RAY_FINETUNE_CACHE: /cache/ray-finetune
RAY_AUTH_MODE: {{ $root.Values.auth.mode }}
RAY_USAGE_STATS_ENABLED: "0"
{{- /* Ray kills a stopping driver after 3 s and a drained worker at once: a checkpoint needs the pod's grace period. */}}
RAY_JOB_STOP_WAIT_TIME_S: {{ $grace | quote }}
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: {{ $grace | quote }}
{{- /* Ray Train's default of 60 s is less than a node takes to start and pull the image. */}}
RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S: {{ include "ray-finetune.text" $root.Values.lifecycle.workersStartTimeoutSeconds | quote }}
{{- if ne .role "worker" }}
{{- /* Without it NVML fails on a CPU node, where the container runtime has no driver to mount. */}}
NVIDIA_VISIBLE_DEVICES: void
{{- end }}
{{- if gt (int .node.gpus) 0 }}
{{- /* NCCL's bootstrap must not choose EKS Pod Identity's link-local interface; a prefix after ^ is left out. */}}
NCCL_SOCKET_IFNAME: "^lo,docker,pod-id-link"
{{- end }}
{{- if gt (int .node.efa) 0 }}
FI_PROVIDER: efa
{{- /* NCCL loads libnccl-net-ofi.so, the plugin's file in the image. */}}
NCCL_NET_PLUGIN: ofi
{{- /* Naming the network makes a broken EFA an error; without it NCCL goes on over TCP, at half the speed or less. */}}
{{- if eq (include "ray-finetune.efaRequired" $root) "true" }}
NCCL_NET: Libfabric
{{- end }}
{{- end }}
{{- end -}}

{{- define "ray-finetune.env" -}}
{{- $env := include "ray-finetune.builtinEnv" . | fromYaml -}}
{{- range $name, $value := .root.Values.env -}}
{{- $_ := set $env $name $value -}}
{{- end -}}
env:
{{- range $name, $value := $env }}
{{- if kindIs "map" $value }}
  - name: {{ $name }}
    valueFrom: {{- toYaml $value.valueFrom | nindent 6 }}
{{- else if not (kindIs "invalid" $value) }}
  - name: {{ $name }}
    value: {{ include "ray-finetune.text" $value | quote }}
{{- end }}
{{- end }}
{{- with .root.Values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
