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
  {{- range include "mars-ray.workerGroups" . | fromYamlArray }}
  {{- include "mars-ray.group" (list $ .) | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* All groups of workers: each with its name, and everything that `workers` has. */}}
{{- define "mars-ray.workerGroups" -}}
{{- $groups := list (merge (dict "name" "workers") .Values.workers) }}
{{- range $name, $own := .Values.moreWorkers }}
  {{- $groups = append $groups (mergeOverwrite (deepCopy $.Values.workers) (dict "name" $name "min" 0 "surge" 0) $own) }}
{{- end }}
{{- $groups | toYaml }}
{{- end }}

{{- define "mars-ray.objectStore" -}}
{{ mul .objectStoreGB 1000000000 | quote }}
{{- end }}

{{- /* (list root group): how many there are is the autoscaler's matter. */}}
{{- define "mars-ray.group" -}}
{{- $group := index . 1 -}}
- groupName: {{ $group.name }}
  minReplicas: {{ $group.min | int }}
  maxReplicas: {{ add $group.max $group.surge }}
  {{- with $group.priority }}
  priority: {{ . | int }}
  {{- end }}
  rayStartParams:
    object-store-memory: {{ include "mars-ray.objectStore" $group }}
    num-cpus: {{ $group.cpu | ceil | quote }} {{- /* Ray would take the limit. */}}
    {{- with $group.gpus }}
    num-gpus: {{ . | int | quote }} {{- /* Ray does not know parts of a GPU by their resource's name. */}}
    {{- end }}
    {{- with $group.resources }}
    resources: {{ . | toJson | quote | squote }} {{- /* KubeRay takes the outer quotes away. */}}
    {{- end }}
  template:
    {{- include "mars-ray.pod" (list (index . 0) $group "worker") | nindent 4 }}
{{- end }}
