{{- /* Serve's configuration. New replicas start before old ones stop. */}}
{{- define "mars-ray.serve" -}}
{{- $job := deepCopy .Values.service }}
{{- $_ := set $job "host" "0.0.0.0" }}
{{- $_ := set $job "port" 8000 }}
{{- $_ := set $job "model_cache" "/cache/models" }}
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
