{{- define "mars-ray.restricted" -}}
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
{{- end }}

{{- define "mars-ray.environment" -}}
- { name: RAY_USAGE_STATS_ENABLED, value: "0" }
- { name: RAY_JOB_STOP_WAIT_TIME_S, value: "1800" }
- { name: RAY_SERVE_USE_GRPC_BY_DEFAULT, value: "1" }
- { name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: "1073741824" }
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: mars_ray.serve.ingress.proxy.middlewares
{{- /* For so long Ray lets a pod that is told to stop drain; 30 s otherwise. Longer answers are cut. */}}
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ add 20 (include "mars-ray.drain" .) | quote }}
- { name: HF_HOME, value: /cache/huggingface }
{{- if .Values.model.hub }}
- { name: HF_HUB_OFFLINE, value: "1" }
{{- end }}
{{- range $name, $value := .Values.env }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- end }}

{{- /* (list group requests): the requests are beside those that are limits, too. */}}
{{- define "mars-ray.resources" -}}
{{- $group := index . 0 }}{{ $limit := ($group.pod | default dict).cpuLimit }}
{{- $resources := dict "cpu" ($group.cpu | toString) "memory" $group.memory }}
{{- if $group.gpus }}{{ $_ := set $resources $group.gpuResource ($group.gpus | toString) }}{{ end -}}
requests: {{ merge (index . 1) $resources | toJson }}
{{- if not (kindIs "invalid" $limit) }}
  {{- $resources = merge (ternary (dict "cpu" ($limit | toString)) (dict) (gt ($limit | float64) 0.0)) (omit $resources "cpu") }}
{{- end }}
limits: {{ toJson $resources }}
{{- end }}

{{- define "mars-ray.mounts" -}}
{{- if .Values.model.claim }}
- { name: shared, mountPath: /shared{{ if eq .Values.kind "RayService" }}, readOnly: true{{ end }} }
{{- end }}
{{- if and (eq .Values.kind "RayService") .Values.keys.secret }}
- { name: keys, mountPath: /etc/mars-ray, readOnly: true }
{{- end }}
- { name: cache, mountPath: /cache }
- { name: object-store, mountPath: /dev/shm }
{{- end }}

{{- /* (list root group) */}}
{{- define "mars-ray.volumes" -}}
{{- $root := index . 0 }}{{ $group := index . 1 }}
{{- with $root.Values.model.claim }}
- name: shared
  persistentVolumeClaim: { claimName: {{ . }} }
{{- end }}
{{- if and (eq $root.Values.kind "RayService") $root.Values.keys.secret }}
- name: keys
  secret: { secretName: {{ $root.Values.keys.secret }}, defaultMode: 0440 }
{{- end }}
- name: cache
  {{- with $root.Values.model.cache }}
  {{- if .storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .storageClass }}
        resources: { requests: { storage: {{ .size }} } }
  {{- else }}
  emptyDir: { sizeLimit: {{ .size }} }
  {{- end }}
  {{- end }}
- name: object-store
  emptyDir: { medium: Memory, sizeLimit: {{ mul 2 $group.objectStoreGB }}Gi }
{{- end }}

{{- /* The models and adapters of the service that are on the hub, each as NAME or NAME@REVISION. */}}
{{- define "mars-ray.repositories" -}}
{{- range concat (list .Values.service) (.Values.service.more_models | default list) }}
{{- if regexMatch "^[\\w.-]+/[\\w.-]+$" .checkpoint }}
{{ .checkpoint }}{{ with .revision }}@{{ . }}{{ end }}
{{- end }}
{{- $engine := .engine | default dict }}
{{- range compact (list (get $engine "draft_adapter")) }}
{{- if regexMatch "^[\\w.-]+/[\\w.-]+(@.+)?$" . }}
{{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* (list root group withWeights): fetches those repositories; the head has no use for weights. */}}
{{- define "mars-ray.fetch" -}}
{{- $root := index . 0 }}{{ $group := index . 1 -}}
{{- range $number, $repository := include "mars-ray.repositories" $root | trim | splitList "\n" }}
{{- $parts := splitn "@" 2 $repository }}
- name: fetch-{{ $number }}
  image: {{ include "mars-ray.image" (list $root $group.image) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  securityContext:
    {{- include "mars-ray.restricted" $ | nindent 4 }}
  command: [hf, download, {{ $parts._0 | quote }}]
  args:
    {{- with $parts._1 }}
    - --revision={{ . }}
    {{- end }}
    {{- range ternary (list "*.safetensors") (list) (index $ 2) | concat (list "*.json" "*.txt" "*.model" "*.jinja") }}
    - --include={{ . }}
    {{- end }}
  env:
    - { name: HF_HOME, value: /cache/huggingface }
    {{- range $name, $value := $root.Values.env }}
    - { name: {{ $name }}, value: {{ $value | quote }} }
    {{- end }}
    {{- with $root.Values.model.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: { secretKeyRef: { name: {{ . }}, key: token } }
    {{- end }}
  resources:
    {{- include "mars-ray.resources" (list (omit $group "gpus") dict) | nindent 4 }}
  volumeMounts:
    - { name: cache, mountPath: /cache }
{{- end }}
{{- end }}

{{- /* (list root group component): the pod of the head or of a group of workers, and what `pod` adds to it. */}}
{{- define "mars-ray.pod" -}}
{{- $pod := include "mars-ray.podWithoutMore" . | fromYaml }}
{{- $more := (index . 1).pod | default dict }}
{{- $ray := first $pod.spec.containers }}
{{- $_ := set $ray "volumeMounts" (concat $ray.volumeMounts ($more.mounts | default list)) }}
{{- $spec := deepCopy ($more.spec | default dict) }}
{{- range $name := list "volumes" "tolerations" "initContainers" "containers" }}
  {{- with get $spec $name }}{{ $_ := set $spec $name (concat (get $pod.spec $name | default list) .) }}{{ end }}
{{- end }}
{{- toYaml (mustMergeOverwrite $pod (dict "metadata" (dict "labels" ($more.labels | default dict)) "spec" $spec)) }}
{{- end }}

{{- define "mars-ray.podWithoutMore" -}}
{{- $root := index . 0 }}{{ $group := index . 1 }}{{ $isHead := eq (index . 2) "head" -}}
metadata:
  labels:
    {{- include "mars-ray.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ index . 2 }}
  {{- with $root.Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.serviceAccount }}
  serviceAccountName: {{ .name }}
  {{- end }}
  {{- /* The autoscaler beside the head asks for pods. */}}
  automountServiceAccountToken: {{ $isHead }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    seccompProfile: { type: RuntimeDefault }
  {{- /* Ray's time to drain, and some to end its processes. The head's, too: when a whole cluster
  goes, Serve's controller has to outlive what it drains. */}}
  terminationGracePeriodSeconds: {{ add 30 (include "mars-ray.drain" $root) }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.spread }}
  {{- if not $isHead }}
  topologySpreadConstraints:
    - topologyKey: {{ .topologyKey }}
      maxSkew: {{ .maxSkew | default 1 | int }}
      whenUnsatisfiable: {{ .whenUnsatisfiable | default "ScheduleAnyway" }}
      {{- /* Not together with the cluster that an upgrade replaces. */}}
      matchLabelKeys: [ray.io/cluster]
      labelSelector:
        matchLabels:
          {{- include "mars-ray.selector" $root | nindent 10 }}
          app.kubernetes.io/component: worker
  {{- end }}
  {{- end }}
  {{- if $root.Values.model.hub }}
  initContainers:
    {{- include "mars-ray.fetch" (list $root $group (not $isHead)) | trim | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ index . 2 }}
      image: {{ include "mars-ray.image" (list $root $group.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "mars-ray.restricted" $root | nindent 8 }}
      env:
        {{- include "mars-ray.environment" $root | nindent 8 }}
      {{- with $root.Values.model.credentials }}
      envFrom:
        - secretRef: { name: {{ . }} }
      {{- end }}
      ports:
        {{- if $isHead }}
        - { name: gcs, containerPort: 6379 }
        - { name: dashboard, containerPort: 8265 }
        - { name: client, containerPort: 10001 }
        {{- end }}
        - { name: serve, containerPort: 8000 }
        - { name: metrics, containerPort: 8080 }
      {{- include "mars-ray.probes" (list $root $isHead) | trim | nindent 6 }}
      resources:
        {{- /* The head's cache has no weights. */}}
        {{- $cache := $root.Values.model.cache }}
        {{- $disk := ternary (dict) (dict "ephemeral-storage" $cache.size) (or $isHead (ne $cache.storageClass "")) }}
        {{- include "mars-ray.resources" (list $group $disk) | nindent 8 }}
      volumeMounts:
        {{- include "mars-ray.mounts" $root | trim | nindent 8 }}
  volumes:
    {{- include "mars-ray.volumes" (list $root $group) | trim | nindent 4 }}
{{- end }}

{{- define "mars-ray.probes" -}}
{{- $root := index . 0 }}{{ $isHead := index . 1 }}
{{- $raylet := dict "path" "/api/local_raylet_healthz" "port" 52365 }}
{{- $alive := ternary (dict "path" "/api/gcs_healthz" "port" 8265) $raylet $isHead }}
{{- /* Of workers Serve's proxy in them: it says no while its replicas are being taken away. */}}
{{- $serves := and (not $isHead) (eq $root.Values.kind "RayService") }}
{{- $ready := ternary (dict "path" "/-/healthz" "port" 8000) $raylet $serves }}
startupProbe:
  httpGet: {{ toJson $alive }}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {{ toJson $alive }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {{ toJson $ready }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ternary 1 3 $serves }}
{{- end }}
