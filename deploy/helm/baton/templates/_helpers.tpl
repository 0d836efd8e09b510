{{/* Names end in at most 16 characters of ours ("-prefill-leaders"), and pods in "-" and a number of a StatefulSet. */}}
{{- define "baton.fullname" -}}
{{- if contains "baton" .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-baton" (.Release.Name | trunc 30 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* What routers look up to find the nodes of a pool; takes what baton.node takes. */}}
{{- define "baton.nodesService" -}}
{{ include "baton.fullname" .root }}-{{ .role }}{{ if gt (int .pool.size) 1 }}-leaders{{ end }}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "baton.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "baton.clusterSecret" -}}
{{- if .Values.clusterSecret.existingSecret -}}{{ .Values.clusterSecret.existingSecret }}
{{- else if .Values.clusterSecret.value -}}{{ include "baton.fullname" . }}-cluster{{- end -}}
{{- end -}}

{{- define "baton.apiKeys" -}}
{{- if .Values.apiKeys.existingSecret -}}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.values -}}{{ include "baton.fullname" . }}-api-keys{{- end -}}
{{- end -}}

{{/* Users of a container: 10001, as in the images. */}}
{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Mutual TLS between routers and nodes. */}}
{{- define "baton.clusterTlsArgs" -}}
- --cluster-ssl-keyfile=/etc/baton/cluster-tls/tls.key
- --cluster-ssl-certfile=/etc/baton/cluster-tls/tls.crt
- --cluster-ssl-ca-certs=/etc/baton/cluster-tls/ca.crt
{{- end -}}

{{- define "baton.clusterTlsVolume" -}}
secret:
  secretName: {{ .Values.clusterTls.existingSecret }}
  defaultMode: 0440
  items:
    - { key: tls.key, path: tls.key }
    - { key: tls.crt, path: tls.crt }
    - { key: ca.crt, path: ca.crt }
{{- end -}}
