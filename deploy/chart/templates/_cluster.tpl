{{- /* The Ray cluster, the same in all kinds of releases. */}}
{{- define "mars-ray.cluster" -}}
rayVersion: {{ .Values.rayVersion | quote }}
authOptions:
  mode: token
  {{- with .Values.token.secret }}
  secretName: {{ . }}
  {{- end }}
{{- with .Values.redis }}
gcsFaultToleranceOptions:
  redisAddress: {{ .address }}
  {{- with .username }}
  redisUsername: { value: {{ . | quote }} }
  {{- end }}
  {{- with .passwordSecret }}
  redisPassword: { valueFrom: { secretKeyRef: { name: {{ . }}, key: password } } }
  {{- end }}
{{- end }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.workers.idleSeconds | int }}
  resources:
    requests: { cpu: 200m, memory: 512Mi }
    limits: { cpu: 500m, memory: 1Gi }
  securityContext:
    {{- include "mars-ray.restricted" . | nindent 4 }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    {{- /* Drivers only: nothing that computes lands here. */}}
    num-cpus: "0"
    num-gpus: "0"
    dashboard-host: 0.0.0.0 {{- /* of the pod, which the network policy closes */}}
    object-store-memory: {{ include "mars-ray.objectStore" .Values.head }}
  template:
    {{- include "mars-ray.pod" (list . .Values.head "head") | nindent 4 }}
workerGroupSpecs:
  {{- $most := add .Values.workers.max .Values.workers.surge }}
  {{- include "mars-ray.group" (list . "workers" .Values.workers $most 0) | nindent 2 }}
  {{- with .Values.spot }}
  {{- $group := deepCopy $.Values.workers }}
  {{- $_ := set $group "min" (.min | default 0) }}
  {{- $_ := set $group "nodeSelector" (merge (dict) .nodeSelector $.Values.workers.nodeSelector) }}
  {{- $_ := set $group "tolerations" (concat $.Values.workers.tolerations (.tolerations | default list)) }}
  {{- include "mars-ray.group" (list $ "spot" $group .max (ternary -1 1 (eq (toString .first) "false"))) | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "mars-ray.objectStore" -}}
{{ mul .objectStoreGB 1000000000 | quote }}
{{- end }}

{{- /* (list root name group most priority): how many there are is the autoscaler's matter. */}}
{{- define "mars-ray.group" -}}
{{- $group := index . 2 -}}
- groupName: {{ index . 1 }}
  minReplicas: {{ $group.min | int }}
  maxReplicas: {{ index . 3 | int }}
  {{- with index . 4 }}
  priority: {{ . }}
  {{- end }}
  rayStartParams:
    object-store-memory: {{ include "mars-ray.objectStore" $group }}
    num-cpus: {{ $group.cpu | ceil | quote }} {{- /* Ray would take the limit. */}}
    {{- with $group.gpus }}
    num-gpus: {{ . | int | quote }} {{- /* Ray does not know parts of a GPU by their resource's name. */}}
    {{- end }}
  template:
    {{- include "mars-ray.pod" (list (index . 0) $group "worker") | nindent 4 }}
{{- end }}
