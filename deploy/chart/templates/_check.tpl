{{- /* The entry of a job of jobs/README.md; empty for a command of one's own. */}}
{{- define "mars-ray.shipped" -}}
{{- with (.Values.job | default dict).name }}
{{- get ($.Files.Get "files/jobs.yaml" | fromYaml) . | default dict | toYaml }}
{{- end }}
{{- end }}

{{- /* Refuses what the schema cannot see: what does not fit together, or would have no effect. */}}
{{- define "mars-ray.check" -}}
{{- if or (gt (len .Release.Name) 47) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name)) }}
{{- fail (printf "the release is named %q: KubeRay takes at most 47 lower-case letters, digits and hyphens, a letter first" .Release.Name) }}
{{- end }}
{{- if hasKey (.Values.moreWorkers | default dict) "workers" }}
{{- fail "moreWorkers.workers: the group `workers` has that name; choose another" }}
{{- end }}
{{- range prepend (include "mars-ray.workerGroups" . | fromYamlArray) (merge (dict "name" "head" "min" 0 "max" 1 "surge" 0) .Values.head) }}
  {{- if gt (.min | float64) (add .max .surge | float64) }}
    {{- fail (printf "%s: min is above max and surge" .name) }}
  {{- end }}
  {{- $limit := (.pod | default dict).cpuLimit | default .cpu }}
  {{- if lt ($limit | float64) (.cpu | float64) }}
    {{- fail (printf "%s.pod.cpuLimit is below %s.cpu, which a pod requests: raise it, or 0 for no limit" .name .name) }}
  {{- end }}
{{- end }}
{{- if .Values.job }}
  {{- if ne .Values.kind "RayJob" }}{{ fail "job has an effect in a release of kind RayJob only: set kind=RayJob, or leave it out" }}{{ end }}
{{- end }}
{{- if eq .Values.kind "RayJob" }}{{ include "mars-ray.checkJob" . }}{{ end }}
{{- if eq .Values.kind "RayService" }}
  {{- include "mars-ray.checkService" . }}
{{- else }}
  {{- if or .Values.gateway .Values.ingress .Values.upgrade.incremental .Values.model.hub }}
    {{- fail "gateway, ingress, upgrade.incremental and model.hub are a service's: leave them out, or set kind=RayService" }}
  {{- end }}
{{- end }}
{{- range $name, $_ := .Values.env }}
  {{- if or (hasPrefix "RAY_SERVE_" $name) (has $name (list "RAY_USAGE_STATS_ENABLED" "RAY_JOB_STOP_WAIT_TIME_S" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "HF_HOME" "HF_HUB_OFFLINE")) }}
    {{- fail (printf "env.%s: the chart sets it; leave it out" $name) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "mars-ray.checkJob" -}}
{{- $job := .Values.job | default dict }}
{{- if eq (empty $job.name) (empty $job.entrypoint) }}
  {{- fail "a RayJob runs one command: set job.name to one of jobs/README.md, or job.entrypoint" }}
{{- end }}
{{- $shipped := include "mars-ray.shipped" . | fromYaml }}
{{- if and $job.name (not $shipped) }}
  {{- fail (printf "job.name: there is no job %q; there are %s" $job.name (.Files.Get "files/jobs.yaml" | fromYaml | keys | sortAlpha | join ", ")) }}
{{- end }}
{{- $groups := include "mars-ray.workerGroups" . | fromYamlArray }}
{{- if and (eq (get $shipped "machines") "gpu") (not (include "mars-ray.haveGpus" .)) }}
  {{- fail (printf "%s wants GPUs: add --values deploy/chart/values/machines-gpu.yaml" $job.name) }}
{{- end }}
{{- range $kind := list "cpus" "gpus" }}
  {{- $asked := dig $kind (get $shipped $kind | default 0) $job }}
  {{- $has := 0.0 }}
  {{- range $groups }}{{ $has = maxf $has (get . (ternary "cpu" "gpus" (eq $kind "cpus")) | toString | float64) }}{{ end }}
  {{- if gt ($asked | float64) $has }}
    {{- fail (printf "job.%s: no worker has %v of them: raise workers, or ask for less" $kind $asked) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "mars-ray.checkService" -}}
{{- $service := .Values.service }}
{{- if and (hasPrefix "/shared/" $service.checkpoint) (not .Values.model.claim) }}
  {{- fail "service.checkpoint is on /shared, which needs model.claim" }}
{{- end }}
{{- if and .Values.model.hub (not (include "mars-ray.repositories" . | trim)) }}
  {{- fail "model.hub fetches what the service names on the hub, but service.checkpoint is no org/name: leave model.hub out" }}
{{- end }}
{{- $isIncremental := eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade" }}
{{- if ne $isIncremental (not (empty .Values.upgrade.incremental)) }}
  {{- fail "upgrade.incremental and upgrade.type NewClusterWithIncrementalUpgrade belong together" }}
{{- end }}
{{- with .Values.upgrade.incremental }}
  {{- if gt (.stepSizePercent | float64) (.maxSurgePercent | default 100 | float64) }}
    {{- fail "upgrade.incremental.stepSizePercent is above maxSurgePercent" }}
  {{- end }}
{{- end }}
{{- range $name := list "gateway" "ingress" }}
  {{- with get $.Values $name }}
    {{- if ne $isIncremental (not (empty .backend)) }}
      {{- fail (printf "%s.backend belongs to the incremental upgrade: KubeRay moves requests in a gateway of its own, %s-gateway, whose service you name there" $name $.Release.Name) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with .Values.gateway }}
  {{- if or (eq (empty .parent) (empty .className)) (ne (empty .className) (empty .tlsSecret)) (and .parent .annotations) }}
    {{- fail "gateway: name a parent, which ends TLS, or className, tlsSecret and annotations, of which the chart makes one" }}
  {{- end }}
{{- end }}
{{- include "mars-ray.checkRoom" . }}
{{- end }}

{{- /* Whether a worker holds a replica, and all workers the full fleets and the ingresses. */}}
{{- define "mars-ray.checkRoom" -}}
{{- $groups := include "mars-ray.workerGroups" . | fromYamlArray }}{{ $service := .Values.service }}
{{- $most := 0 }}{{ $haveCpus := 0.0 }}{{ $haveGpus := 0.0 }}
{{- range $groups }}
  {{- $most = add $most .max }}
  {{- $haveCpus = addf $haveCpus (mulf .max .cpu) }}{{ $haveGpus = addf $haveGpus (mulf .max .gpus) }}
{{- end }}
{{- $allCpus := mulf 0.1 ($service.ingress_replicas | default 1) }}{{ $allGpus := 0.0 }}
{{- range $model := concat (list $service) ($service.more_models | default list) }}
  {{- $cpus := $model.cpus_per_replica | default 1 }}
  {{- $gpus := include "mars-ray.gpus" (dict "model" $model "root" $) | float64 }}
  {{- $parts := get ($model.engine | default dict) "pipeline_parallel_size" | default 1 }}
  {{- $fit := 0.0 }}
  {{- range $group := $groups }}
    {{- $own := divf .cpu (maxf 0.001 $cpus) | floor }}
    {{- if $gpus }}{{ $own = minf $own (mulf $parts (divf .gpus $gpus) | floor) }}{{ end }}
    {{- range $name, $count := $model.resources_per_replica | default dict }}
      {{- $own = minf $own (divf (get ($group.resources | default dict) $name | default 0) $count | floor) }}
    {{- end }}
    {{- $fit = addf $fit (mulf $own .max) }}
  {{- end }}
  {{- if not $fit }}
    {{- fail (printf "a replica takes %v CPUs, %v GPUs and resources %v, and no worker has so many: raise workers.cpu, workers.gpus and workers.resources, or add a group to moreWorkers" $cpus $gpus (toJson ($model.resources_per_replica | default dict))) }}
  {{- end }}
  {{- $fleet := $model.replicas | default "auto" }}
  {{- $scaling := $model.scaling | default dict }}
  {{- if eq (toString $fleet) "auto" }}
    {{- $fleet = $scaling.max_replicas | default 4 }}
  {{- else if or (ne (int ($scaling.min_replicas | default 1)) 1) (ne (int ($scaling.max_replicas | default 4)) 4) }}
    {{- fail (printf "with %v replicas, min_replicas and max_replicas of service.scaling have no effect: set both to null" $fleet) }}
  {{- end }}
  {{- if gt ($fleet | float64) $fit }}
    {{- fail (printf "%v replicas have no room on %d workers, which hold %v: raise workers.max" $fleet $most $fit) }}
  {{- end }}
  {{- $allCpus = addf $allCpus (mulf $fleet $cpus) }}{{ $allGpus = addf $allGpus (mulf $fleet $gpus) }}
{{- end }}
{{- if or (gt $allCpus $haveCpus) (gt $allGpus $haveGpus) }}
  {{- fail (printf "all replicas and ingresses take %v CPUs and %v GPUs, which %d workers do not have: raise workers.max" $allCpus $allGpus $most) }}
{{- end }}
{{- end }}
