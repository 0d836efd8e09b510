{{/* A pool as groups of pods, of which each is a node; takes what baton.node takes. A group of several pods is a node on several
hosts: its leader is the node, for which the ranks of its workers compute. Whichever pod is lost, the node has ended with it, and all
of its pods begin anew; a pod that is a node alone begins again as in a StatefulSet. The controller (kubernetes-sigs/lws) has pods
named in the headless Service that is called as the set is, and makes one if there is none. Without a template for leaders they are
made as workers are. */}}
{{- define "baton.leaderWorkerSet" }}
{{- $name := include "baton.fullname" .root -}}
{{- $groups := gt (int .pool.size) 1 -}}
{{- $pod := dict "root" .root "role" .role "pool" .pool "args" .args "node" .node -}}
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
    restartPolicy: {{ ternary "RecreateGroupOnPodRestart" "None" $groups }}
    {{- if $groups }}
    leaderTemplate:
      {{- include "baton.nodePod" (set $pod "host" "leader") | trim | nindent 6 }}
    {{- end }}
    workerTemplate:
      {{- include "baton.nodePod" (set $pod "host" (ternary "worker" "" $groups)) | trim | nindent 6 }}
{{- end }}

{{/* Fails where the pods of a node do not fit its ranks; takes what baton.node takes. What a file of flags has (--config) is not known
here. */}}
{{- define "baton.checkHosts" }}
{{- $size := int .pool.size }}
{{- $flags := dict }}
{{- range .args }}
{{- $flag := splitn "=" 2 . }}{{ $_ := set $flags $flag._0 (default "" $flag._1) }}
{{- end }}
{{- range list "--nnodes" "--node-rank" "--master-addr" "--master-port" }}
{{- if hasKey $flags . }}{{ fail (printf "%s.args has %s, which the chart sets as %s.size says" $.role . $.role) }}{{ end }}
{{- end }}
{{- if gt $size 1 }}
{{- $what := printf "%s.size is %d" .role $size }}
{{- if ne .pool.kind "LeaderWorkerSet" }}
{{- fail (printf "%s, for which %s.kind must be LeaderWorkerSet. %s.replicas gives more nodes." $what .role .role) }}
{{- end }}
{{- if hasKey $flags "--data-parallel-size" }}
{{- fail (printf "%s, and nodes of several pods cannot be data parallel: --data-parallel-size" $what) }}
{{- end }}
{{- if eq (get $flags "--transport") "ipc" }}
{{- fail (printf "%s, and --transport=ipc moves KV within one machine" $what) }}
{{- end }}
{{- end }}
{{- if not (hasKey $flags "--config") }}
{{- $tensor := max 1 (int (get $flags "--tensor-parallel-size")) }}
{{- $ranks := mul $tensor (max 1 (int (get $flags "--pipeline-parallel-size"))) }}
{{- $each := div $ranks $size }}
{{- $have := printf "%s.args: a node's ranks are %d (--tensor-parallel-size x --pipeline-parallel-size)" .role $ranks }}
{{- if mod $ranks $size }}
{{- fail (printf "%s, which cannot be divided evenly among the pods of %s.size, %d" $have .role $size) }}
{{- end }}
{{- if and (mod $each $tensor) (mod $tensor $each) }}
{{- fail (printf "%s, %d in each pod of %s.size, which stages of %d do not fit" $have $each .role $tensor) }}
{{- end }}
{{- if and (ne .node.device "cpu") .node.gpus (gt $each (int64 .node.gpus)) }}
{{- fail (printf "%s, %d in each pod, which need a GPU each, and %s.gpus is %d" $have $each .role (int .node.gpus)) }}
{{- end }}
{{- end }}
{{- end }}
