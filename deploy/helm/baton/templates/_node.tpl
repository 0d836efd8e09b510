{{/* A pool of prefill or decode nodes. root: the chart's scope; role; pool: its own values; node: with the common ones under
them; args: the flags of both. */}}
{{- define "baton.node" }}
{{- $name := include "baton.fullname" .root }}
{{- $who := dict "root" .root "component" .role }}
{{- if gt (int .pool.size) 1 }}
{{- $why := "a node of baton runs on one machine, so that it cannot be spread over several pods yet" }}
{{- fail (printf "%s.size is %d and must be 1: %s. %s.replicas gives more nodes." .role (int .pool.size) $why .role) }}
{{- end }}
---
# Headless: DNS answers with the address of each pod that is ready, which routers look up.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" $who | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector: {{- include "baton.selector" $who | nindent 4 }}
  ports:
    - { name: grpc, port: 9000, targetPort: grpc }
    - { name: metrics, port: 9100, targetPort: metrics }
---
{{- if eq .pool.kind "StatefulSet" }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" $who | nindent 4 }}
spec:
  serviceName: {{ $name }}-{{ .role }}
  {{- if not .pool.autoscaling.enabled }}
  replicas: {{ .pool.replicas }}
  {{- end }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "baton.selector" $who | nindent 6 }}
  template:
    {{- include "baton.nodePod" . | trim | nindent 4 }}
{{- else }}
{{ include "baton.leaderWorkerSet" . }}
{{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" $who | nindent 4 }}
spec:
  selector:
    matchLabels: {{- include "baton.selector" $who | nindent 6 }}
  {{- toYaml .pool.podDisruptionBudget | nindent 2 }}
{{- if .pool.autoscaling.enabled }}
{{ include "baton.scaledObject" . }}
{{- end }}
{{- end }}
