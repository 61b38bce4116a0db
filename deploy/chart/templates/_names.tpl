{{- define "mars-ray.selector" -}}
app.kubernetes.io/name: mars-ray
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mars-ray.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "mars-ray.labels" . | nindent 2 }}
{{- end }}

{{- /* Of the resource that KubeRay reads. */}}
{{- define "mars-ray.rayMetadata" -}}
{{ include "mars-ray.metadata" . }}
{{- with .Values.labels }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "mars-ray.labels" -}}
{{ include "mars-ray.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* (list root name): a repository of the registry, by tag unless the name has a digest. */}}
{{- define "mars-ray.image" -}}
{{- $root := index . 0 }}{{ $name := index . 1 -}}
{{ $root.Values.image.registry }}/{{ $name }}
{{- if not (contains "@" $name) }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* How long an ending process has for what it has accepted. */}}
{{- define "mars-ray.drain" -}}
{{- if eq .Values.kind "RayService" }}{{ .Values.service.drain_s | int }}{{ else }}90{{ end }}
{{- end }}

{{- /* The most seconds of a request, and some for Serve to notice. */}}
{{- define "mars-ray.requestSeconds" -}}
{{- $limits := .Values.service.limits | default dict -}}
{{ add 60 (get $limits "request_s" | default 600 | int) }}
{{- end }}

{{- /* (list root section): the service that a gateway asks. */}}
{{- define "mars-ray.backend" -}}
{{- $root := index . 0 }}{{ $backend := (index . 1).backend | default dict -}}
name: {{ $backend | dig "name" (printf "%s-serve-svc" $root.Release.Name) }}
port: {{ $backend | dig "port" 8000 | int }}
{{- end }}
