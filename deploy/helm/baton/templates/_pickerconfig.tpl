{{/* The configuration of llm-d's endpoint picker. Routers know the prefix caches of all nodes alike, and say alike how full these
are: what tells routers apart is how many requests each of them has. No router counts as full: routers refuse by themselves what is
too much (--max-num-requests). Bodies are not read, so that all paths of the API are served. */}}
{{- define "baton.pickerConfig" -}}
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: passthrough-parser
  - type: queue-scorer
  - type: active-request-scorer
  - type: session-affinity-scorer
  - type: metrics-data-source
    parameters:
      scheme: {{ ternary "https" "http" (not (empty .Values.router.tlsSecret)) }}
      path: /metrics
      insecureSkipVerify: true # pods are read by address, which certificates do not name
  - type: core-metrics-extractor
  - type: utilization-detector
    parameters: { queueDepthThreshold: 1000000, kvCacheUtilThreshold: 1.0, metricsStalenessThreshold: 5s }
flowControl:
  saturationDetector: { pluginRef: utilization-detector }
requestHandler:
  parsers: [{ pluginRef: passthrough-parser }]
schedulingProfiles:
  - name: default
    plugins:
      - { pluginRef: queue-scorer, weight: 2 }
      - { pluginRef: active-request-scorer, weight: 1 }
      - { pluginRef: session-affinity-scorer, weight: 4 } # of clients that send back the x-session-token of an answer
{{- end -}}
