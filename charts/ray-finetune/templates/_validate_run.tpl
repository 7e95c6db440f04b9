{{- /* The checks of _validate.tpl that are about the run, not its nodes. */ -}}

{{- define "ray-finetune.validateEfa" -}}
{{- $node := include "ray-finetune.node" . | fromJson -}}
{{- if and .Values.efa.required (not (int $node.efa)) -}}
{{- if and (not (kindIs "invalid" .Values.workers.efa)) (not (int .Values.workers.efa)) -}}
{{- fail "efa.required is true, but workers.efa is 0: leave workers.efa out, or set efa.required to false" -}}
{{- end -}}
{{- if and .Values.workers.instanceType (not (include "ray-finetune.catalogue" . | fromJson)) -}}
{{- fail (printf "efa.required is true, but the chart does not know %s: write the number of its interfaces as workers.efa" .Values.workers.instanceType) -}}
{{- end -}}
{{- fail (printf "efa.required is true, but %s has no EFA interface: choose a type that has, such as g6.8xlarge or larger, or set efa.required to false" (default "a worker without workers.instanceType" .Values.workers.instanceType)) -}}
{{- end -}}
{{- if and (int $node.efa) (not (int $node.gpus)) -}}
{{- fail (printf "workers.efa is %d, but workers.gpus is 0 and training on CPUs does not use EFA: leave workers.efa out" (int $node.efa)) -}}
{{- end -}}
{{- $network := default "Libfabric" .Values.env.NCCL_NET | toString -}}
{{- if and (eq (include "ray-finetune.efaRequired" .) "true") (not (has (lower $network) (list "libfabric" "aws libfabric" "ofi"))) -}}
{{- fail (printf "env.NCCL_NET is %q, but EFA is required, as it is where several nodes have it: leave it out, or set efa.required to false" $network) -}}
{{- end -}}
{{- if and .Values.efa.test (not (int $node.efa)) -}}
{{- fail "efa.test is true, but workers ask for no EFA interface: set workers.instanceType to a type that has, and workers.nodes to 2 or more" -}}
{{- end -}}
{{- if and .Values.efa.lockMemory (not (int $node.efa)) -}}
{{- fail "efa.lockMemory is true, but workers ask for no EFA interface and only EFA locks memory: leave it out" -}}
{{- end -}}
{{- $row := include "ray-finetune.catalogue" . | fromJson -}}
{{- if and (eq (toString .Values.env.FI_EFA_USE_DEVICE_RDMA) "1") (eq (toString $row.efa_rdma_read) "false") -}}
{{- fail (printf "env.FI_EFA_USE_DEVICE_RDMA is 1, but EFA of %s cannot read by RDMA and libfabric would abort: leave it out" .Values.workers.instanceType) -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.validateLifecycle" -}}
{{- $lifecycle := .Values.lifecycle -}}
{{- range $key := list "preRunningDeadlineSeconds" "workersStartTimeoutSeconds" -}}
{{- if ge (int64 (get $lifecycle $key)) (int64 $lifecycle.activeDeadlineSeconds) -}}
{{- fail (printf "lifecycle.%s is %d, but the whole run is ended after lifecycle.activeDeadlineSeconds, %d: write less" $key (int64 (get $lifecycle $key)) (int64 $lifecycle.activeDeadlineSeconds)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.validateQueue" -}}
{{- $queue := .Values.queue -}}
{{- range $key := list "priorityClass" "requiredTopology" "preferredTopology" -}}
{{- if and (get $queue $key) (not $queue.name) -}}
{{- fail (printf "queue.%s is %q, but no queue.name says which Kueue queue it is for: set queue.name" $key (get $queue $key)) -}}
{{- end -}}
{{- end -}}
{{- if and $queue.requiredTopology $queue.preferredTopology -}}
{{- fail "queue.requiredTopology and queue.preferredTopology are both set, but Kueue takes one: leave one out" -}}
{{- end -}}
{{- if and (eq (include "ray-finetune.checksFirst" .) "true") .Values.serviceAccount.create -}}
{{- fail "queue.check is true, but serviceAccount.create is true as well, and the check runs before the release has made its account: make one beforehand, set serviceAccount.create to false and serviceAccount.name to its name, or set queue.check to false to go without the check" -}}
{{- end -}}
{{- end -}}

{{- /* Labels by which KubeRay, Kueue and this chart find their pods, and variables that KubeRay sets or refuses. */ -}}
{{- define "ray-finetune.validatePods" -}}
{{- range $key, $_ := .Values.podLabels -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|created-by|instance|component)$|ray\\.io/|ray-finetune\\.io/|kueue\\.x-k8s\\.io/)" $key -}}
{{- fail (printf "podLabels.%s is a label by which pods are found: leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := .Values.podAnnotations -}}
{{- if regexMatch "^(ray\\.io|kueue\\.x-k8s\\.io)/" $key -}}
{{- fail (printf "podAnnotations.%s changes how KubeRay or Kueue treats a pod: leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := .Values.monitoring.labels -}}
{{- if regexMatch "^(app\\.kubernetes\\.io|helm\\.sh|ray-finetune\\.io)/" $key -}}
{{- fail (printf "monitoring.labels.%s is a label of the chart: leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- $owned := list "RAY_AUTH_TOKEN" "RAY_CLUSTER_NAME" "RAY_CLUSTER_NAMESPACE" "RAY_CLOUD_INSTANCE_ID" "RAY_NODE_TYPE_NAME" "RAY_ADDRESS" "RAY_IP" "FQ_RAY_IP" "RAY_PORT" "KUBERAY_GEN_RAY_START_CMD" "RAY_USAGE_STATS_EXTRA_TAGS" "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME" "RAY_enable_autoscaler_v2" -}}
{{- range $name, $_ := .Values.env -}}
{{- if has $name $owned -}}
{{- fail (printf "env.%s belongs to KubeRay: leave it out" $name) -}}
{{- end -}}
{{- if eq $name "RAY_AUTH_MODE" -}}
{{- fail "env.RAY_AUTH_MODE would differ from auth.mode: set auth.mode" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ray-finetune.validateSecrets" -}}
{{- $switches := list "" "0" "1" "true" "false" "yes" "no" "on" "off" "null" -}}
{{- range $name, $value := .Values.env -}}
{{- /* Some switches have such a name: HF_HUB_DISABLE_IMPLICIT_TOKEN. */ -}}
{{- $switch := or (kindIs "map" $value) (has (include "ray-finetune.text" $value | lower) $switches) -}}
{{- if and (not $switch) (regexMatch "(?i)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_?ID)?|SECRET_?KEY|PRIVATE_?KEY)$" $name) -}}
{{- fail (printf "env.%s looks like a secret, and values are kept in Git: write valueFrom with a secretKeyRef" $name) -}}
{{- end -}}
{{- end -}}
{{- include "ray-finetune.refuseSecret" (dict "key" "" "value" (omit .Values "global")) -}}
{{- end -}}

{{- /* Walks all values for text in the form of a well-known key, wherever it is. */ -}}
{{- define "ray-finetune.refuseSecret" -}}
{{- $key := .key -}}
{{- if kindIs "map" .value -}}
{{- range $name, $value := .value -}}
{{- include "ray-finetune.refuseSecret" (dict "key" (printf "%s.%s" $key $name | trimPrefix ".") "value" $value) -}}
{{- end -}}
{{- else if kindIs "slice" .value -}}
{{- range $index, $value := .value -}}
{{- include "ray-finetune.refuseSecret" (dict "key" (printf "%s[%d]" $key $index) "value" $value) -}}
{{- end -}}
{{- else if kindIs "string" .value -}}
{{- if regexMatch "(^|[^A-Za-z0-9_-])(hf_[A-Za-z0-9]{30,}|(AKIA|ASIA)[A-Z0-9]{16}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22,}|xox[abprs]-[A-Za-z0-9-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/ :@]*:[^/ @]+@" .value -}}
{{- fail (printf "%s holds what looks like a key, and values are kept in Git: keep it in a Secret and name it under env or envFrom" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
