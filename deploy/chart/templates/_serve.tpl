{{- /* GPUs of a model's replica. Said here, because a service may start before workers with GPUs do. */}}
{{- define "mars-ray.gpus" -}}
{{- $engine := .model.engine | default dict }}
{{- if not (kindIs "invalid" .model.gpus_per_replica) }}{{ .model.gpus_per_replica }}
{{- else if or (eq (get $engine "device") "cpu") (not (include "mars-ray.haveGpus" .root)) }}0
{{- else }}{{ mul (get $engine "pipeline_parallel_size" | default 1) (get $engine "tensor_parallel_size" | default 1) }}
{{- end }}
{{- end }}

{{- /* Not empty if a group of workers has GPUs. */}}
{{- define "mars-ray.haveGpus" -}}
{{- range include "mars-ray.workerGroups" . | fromYamlArray }}{{ if .gpus }}yes{{ end }}{{ end }}
{{- end }}

{{- /* Serve's configuration. New replicas start before old ones stop. */}}
{{- define "mars-ray.serve" -}}
{{- $job := deepCopy .Values.service }}
{{- $_ := set $job "host" "0.0.0.0" }}
{{- $_ := set $job "port" 8000 }}
{{- $_ := set $job "model_cache" "/cache/models" }}
{{- range $model := concat (list $job) ($job.more_models | default list) }}
  {{- $gpus := include "mars-ray.gpus" (dict "model" $model "root" $) | float64 }}
  {{- if and $gpus (kindIs "invalid" $model.gpus_per_replica) }}{{ $_ := set $model "gpus_per_replica" $gpus }}{{ end }}
{{- end }}
{{- if .Values.keys.secret }}{{ $_ := set $job "keys_file" "/etc/mars-ray/keys.toml" }}{{ end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  # Above `limits.request_s`: a request that is ours to end is not cut by Serve before.
  request_timeout_s: {{ include "mars-ray.requestSeconds" . }}
logging_config:
  log_level: WARNING
  encoding: JSON
applications:
  - name: mars-ray
    route_prefix: /
    import_path: mars_ray.serve.deploy:build_app
    args:
      {{- toYaml $job | nindent 6 }}
{{- end }}
