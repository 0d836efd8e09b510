{{/* KEDA's object for a pool; takes what baton.node takes. Routers' metrics are asked for, each of which knows all nodes: the
largest answer counts. */}}
{{- define "baton.scaledObject" }}
{{- $name := include "baton.fullname" .root }}
{{- $of := printf "namespace=\"%s\", service=\"%s-router\"" .root.Release.Namespace $name }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}-{{ .role }}
  labels: {{- include "baton.labels" (dict "root" .root "component" .role) | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: {{ ternary "apps/v1" "leaderworkerset.x-k8s.io/v1" (eq .pool.kind "StatefulSet") }}
    kind: {{ .pool.kind }}
    name: {{ $name }}-{{ .role }}
  minReplicaCount: {{ .pool.autoscaling.minReplicas }}
  maxReplicaCount: {{ .pool.autoscaling.maxReplicas }}
  pollingInterval: 15
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleUp:
          policies: [{ type: Pods, value: 1, periodSeconds: 60 }]
        scaleDown:
          stabilizationWindowSeconds: 600
          policies: [{ type: Pods, value: 1, periodSeconds: 120 }]
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.autoscaling.prometheusUrl }}
        threshold: {{ .pool.autoscaling.requests | quote }}
        ignoreNullValues: "false" # without figures of routers nothing is known: a pool stays as it is
        query: |-
          sum(max by (state) (baton:pool_requests{ {{- $of }}, pool="{{ .role }}"}))
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.autoscaling.prometheusUrl }}
        threshold: "1"
        ignoreNullValues: "false"
        # one more than there are, as long as this pool is the bottleneck; else 0, which asks for none
        query: |-
          (max(baton:nodes{ {{- $of }}, node_role="{{ .role }}", state="up"}) + 1)
            * (max(avg_over_time(baton:bottleneck{ {{- $of }}, pool="{{ .role }}"}[5m])) > bool 0.5)
{{- end }}
