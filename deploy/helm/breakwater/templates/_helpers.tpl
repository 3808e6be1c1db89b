{{- define "breakwater.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "breakwater" $name) }}{{ $name = printf "%s-breakwater" $name }}{{ end -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels that select a component's pods: of (dict "root" $ "component" name). */}}
{{- define "breakwater.selector" -}}
app.kubernetes.io/name: breakwater
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "breakwater.labels" -}}
{{ include "breakwater.selector" . }}
app.kubernetes.io/part-of: breakwater
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A hook before an installation and an upgrade, where nothing else of the release is there yet. */}}
{{- define "breakwater.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
{{- end -}}

{{/* The config as data. Fails if it is not YAML; whether it is valid, the Job `setup` checks. */}}
{{- define "breakwater.config" -}}
{{- $config := fromYaml .Values.config -}}
{{- if hasKey $config "Error" }}{{ fail (printf "config: is not YAML: %s" $config.Error) }}{{ end -}}
{{- $config | toJson -}}
{{- end -}}

{{/* A URL with a user, and with a password that Kubernetes puts in: of (dict "url" … "user" … "variable" …). */}}
{{- define "breakwater.url" -}}
{{- $parts := splitn "://" 2 .url -}}
{{- printf "%s://%s:$(%s)@%s" $parts._0 .user .variable $parts._1 -}}
{{- end -}}

{{/* What a URL of Redis ends with: the user and the password of its Sentinels. */}}
{{- define "breakwater.sentinel" -}}
{{- $options := list -}}
{{- with .user }}{{ $options = append $options (printf "sentinel_username=%s" .) }}{{ end -}}
{{- if .password }}{{ $options = append $options "sentinel_password=$(BW_SENTINEL_PASSWORD)" }}{{ end -}}
{{- if $options }}?{{ join "&" $options }}{{ end -}}
{{- end -}}

{{/* The ports of a URL's hosts, as JSON; behind Sentinels, also that of Redis itself. */}}
{{- define "breakwater.ports" -}}
{{- $parts := splitn "://" 2 . -}}
{{- $sentinel := hasSuffix "+sentinel" $parts._0 -}}
{{- $default := ternary 26379 (get (dict "nats" 4222 "tls" 4222 "redis" 6379 "rediss" 6379 "http" 8123 "https" 8443) $parts._0) $sentinel -}}
{{- $ports := ternary (list 6379) list $sentinel -}}
{{- range splitList "," (regexReplaceAll "/.*" $parts._1 "") -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default (toString $default) | int) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{- define "breakwater.password" -}}
- name: {{ .variable }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secrets.passwords | quote }}, key: {{ .variable }}}}
{{- end -}}

{{/* The variables of a service: of (dict "root" $ "component" name "service" its entry in files/services.yaml). */}}
{{- define "breakwater.environment" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $passwords := dict "breakwater" "BW_CLICKHOUSE_PASSWORD" "reader" "BW_CLICKHOUSE_READER_PASSWORD" "alerter" "BW_CLICKHOUSE_ALERTER_PASSWORD" -}}
{{- with .service -}}
{{- $natsPassword := printf "BW_NATS_%s_PASSWORD" (upper $.component) -}}
{{- if .nats }}
{{ include "breakwater.password" (dict "root" $root "variable" $natsPassword) }}
- name: BREAKWATER_NATS_URL
  value: {{ include "breakwater.url" (dict "url" $values.nats.url "user" $.component "variable" $natsPassword) | quote }}
{{- end }}
{{- if .redis }}
{{ include "breakwater.password" (dict "root" $root "variable" "BW_REDIS_PASSWORD") }}
{{- $sentinel := contains "+sentinel://" $values.redis.url | ternary $values.redis.sentinel dict }}
{{- if $sentinel.password }}
{{ include "breakwater.password" (dict "root" $root "variable" "BW_SENTINEL_PASSWORD") }}
{{- end }}
- name: BREAKWATER_REDIS_URL
  value: {{ printf "%s%s" (include "breakwater.url" (dict "url" $values.redis.url "user" $values.redis.user "variable" "BW_REDIS_PASSWORD")) (include "breakwater.sentinel" $sentinel) | quote }}
{{- end }}
{{- with .clickhouse }}
{{ include "breakwater.password" (dict "root" $root "variable" (get $passwords .)) }}
- name: BREAKWATER_CLICKHOUSE_URL
  value: {{ include "breakwater.url" (dict "url" $values.clickhouse.url "user" . "variable" (get $passwords .)) | quote }}
{{- end }}
{{- if .analyst }}
{{ include "breakwater.password" (dict "root" $root "variable" $passwords.reader) }}
- name: BREAKWATER_CLICKHOUSE_ANALYST_URL
  value: {{ include "breakwater.url" (dict "url" $values.clickhouse.url "user" "analyst" "variable" $passwords.reader) | quote }}
{{- end }}
{{- if .planeKey }}
- name: BREAKWATER_PLANE_KEY
  valueFrom: {secretKeyRef: {name: {{ $values.secrets.passwords | quote }}, key: BW_PLANE_KEY}}
{{- end }}
{{- if .apiKeys }}
- {name: BREAKWATER_API_KEYS_FILE, value: /etc/breakwater-keys/api_keys.json}
{{- end }}
{{- end }}
{{- with $values.tls }}
{{- if .secret }}
{{- range $variable, $file := dict "CA" .ca "CERT" .cert "KEY" .key }}
{{- if $file }}
- {name: BREAKWATER_TLS_{{ $variable }}, value: {{ printf "/etc/breakwater-tls/%s" $file | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What all containers have in common. */}}
{{- define "breakwater.container" -}}
image: {{ printf "%s%s" .Values.image.repository (ternary (printf "@%s" .Values.image.digest) (printf ":%s" (.Values.image.tag | default .Chart.AppVersion)) (ne .Values.image.digest "")) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* What all pods have in common. */}}
{{- define "breakwater.pod" -}}
automountServiceAccountToken: false
{{/* Otherwise, Kubernetes sets BREAKWATER_CONSOLE_PORT to the `tcp://…` of the Service, which is also a setting. */ -}}
enableServiceLinks: false
{{/* The first process then reaps what `process` providers leave behind. */ -}}
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  {{- with .Values.runAsUser }}
  runAsUser: {{ toJson . }}
  runAsGroup: {{ toJson . }}
  fsGroup: {{ toJson . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes: of (dict "root" $ "service" … "settings" … "configMap" name). The ConfigMap is mounted as a folder, without
     subPath, because a single file would stay as it was. */}}
{{- define "breakwater.mounts" -}}
- {name: config, mountPath: /etc/breakwater, readOnly: true}
- {name: last-good, mountPath: /var/lib/breakwater-config}
- {name: tmp, mountPath: /tmp}
{{- if .service.apiKeys }}
- {name: keys, mountPath: /etc/breakwater-keys, readOnly: true}
{{- end }}
{{- if .root.Values.tls.secret }}
- {name: tls, mountPath: /etc/breakwater-tls, readOnly: true}
{{- end }}
{{- with .settings.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "breakwater.volumes" -}}
- {name: config, configMap: {name: {{ .configMap }}}}
- {name: last-good, emptyDir: {sizeLimit: 16Mi}}
- {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
{{- if .service.apiKeys }}
- {name: keys, secret: {secretName: {{ .root.Values.secrets.apiKeys | quote }}, optional: true}}
{{- end }}
{{- with .root.Values.tls.secret }}
- {name: tls, secret: {secretName: {{ . | quote }}}}
{{- end }}
{{- with .settings.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
