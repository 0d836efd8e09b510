{{/* A pool of prefill or decode nodes. root: the chart's scope; role; pool: its own values; node: with the common ones under
them; args: the flags of both. */}}
{{- define "baton.node" }}
{{- $name := include "baton.fullname" .root }}
{{- $who := dict "root" .root "component" .role }}
{{- $groups := gt (int .pool.size) 1 }}
{{- include "baton.checkHosts" . }}
---
# Headless: DNS answers with the address of each node that is ready, which routers look up.
apiVersion: v1
kind: Service
metadata:
  name: {{ include "baton.nodesService" . }}
  labels: {{- include "baton.labels" $who | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector:
    {{- include "baton.selector" $who | nindent 4 }}
    {{- if $groups }}
    leaderworkerset.sigs.k8s.io/worker-index: "0" # leaders
    {{- end }}
  ports:
    - { name: grpc, port: 9000, targetPort: grpc }
    - { name: metrics, port: 9100, targetPort: metrics }
{{- if $groups }}
---
# Headless too: the names by which the pods of a group find each other, before any is ready.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" $who | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "baton.selector" $who | nindent 4 }}
  ports:
    - { name: master, port: 29501, targetPort: 29501 }
{{- end }}
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
  {{- /* Of pods: a budget of how many may be away never costs more nodes than that; of how many stay, each has all of its pods. */}}
  {{- $budget := deepCopy .pool.podDisruptionBudget }}
  {{- with $budget.minAvailable }}
  {{- if not (kindIs "string" .) }}{{ $_ := set $budget "minAvailable" (mul . $.pool.size) }}{{ end }}
  {{- end }}
  {{- toYaml $budget | nindent 2 }}
{{- if .pool.autoscaling.enabled }}
{{ include "baton.scaledObject" . }}
{{- end }}
{{- end }}
