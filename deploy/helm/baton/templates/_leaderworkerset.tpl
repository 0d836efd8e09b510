{{/* A pool as groups of pods, of which each is a node; takes what baton.node takes. There is one pod in a group as yet, its leader.
The controller (kubernetes-sigs/lws) gives groups a headless Service of this name, unless there is one: there is ours, which names
only pods that are ready. Pods without a template for leaders are made as workers are. */}}
{{- define "baton.leaderWorkerSet" }}
{{- $name := include "baton.fullname" .root -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" (dict "root" .root "component" .role) | nindent 4 }}
spec:
  {{- if not .pool.autoscaling.enabled }}
  replicas: {{ .pool.replicas }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: { maxUnavailable: 1, maxSurge: 0 }
  startupPolicy: LeaderCreated
  networkConfig: { subdomainPolicy: Shared }
  leaderWorkerTemplate:
    size: {{ .pool.size }}
    restartPolicy: None # a container begins again in its pod, as in a StatefulSet: nobody else is of its group
    workerTemplate:
      {{- include "baton.nodePod" . | trim | nindent 6 }}
{{- end }}
