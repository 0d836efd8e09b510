{{/* A pool of prefill or decode nodes. root: the chart's scope; role; pool: its own values; node: with the common ones under
them; args: the flags of both. */}}
{{- define "baton.node" }}
{{- $root := .root }}
{{- $node := .node }}
{{- $name := include "baton.fullname" .root }}
{{- $cluster := include "baton.clusterSecret" .root }}
{{- $who := dict "root" .root "component" .role }}
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
    metadata:
      labels: {{- include "baton.selector" $who | nindent 8 }}
      {{- with merge (dict) $node.podAnnotations (ternary $node.rdma.annotations (dict) $node.rdma.enabled) }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      # SIGTERM drains: running requests move to other nodes or end. Then the engine's thread has ten seconds.
      terminationGracePeriodSeconds: {{ add (ceil $root.Values.drainTimeout) 30 }}
      securityContext: {{- include "baton.podSecurity" $root | nindent 8 }}
      {{- with $node.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $node.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - { name: {{ . }} }
        {{- end }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "baton.image" (dict "root" $root "image" $root.Values.image.node) }}
          imagePullPolicy: {{ $root.Values.image.node.pullPolicy }}
          args:
            - {{ .role }}
            - --model={{ $root.Values.model }}
            {{- with $root.Values.servedModelName }}
            - --served-model-name={{ . }}
            {{- end }}
            - --node-id=$(POD_NAME)
            - --listen={{ ternary "[$(POD_IP)]" "$(POD_IP)" $root.Values.ipv6 }}:9000
            - --metrics-port=9100
            - --device={{ $node.device }}
            - --drain-timeout={{ $root.Values.drainTimeout }}
            - --log-format={{ $root.Values.logFormat }}
            {{- if $cluster }}
            - --cluster-secret-file=/etc/baton/cluster/secret
            {{- end }}
            {{- range .args }}
            - {{ . | quote }}
            {{- end }}
          env:
            - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
            - { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
            - { name: HOME, value: /tmp }
            {{- if $root.Values.models.readOnly }}
            - { name: HF_HUB_OFFLINE, value: "1" }
            {{- end }}
            - { name: HF_HOME, value: /models }
            {{- with $root.Values.models.hubTokenSecret }}
            {{- if .name }}
            - { name: HF_TOKEN, valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } } }
            {{- end }}
            {{- end }}
          ports:
            - { name: grpc, containerPort: 9000 }
            - { name: metrics, containerPort: 9100 }
          # The page is there when the weights are loaded and the engine is warm.
          startupProbe:
            httpGet: { path: /health, port: metrics }
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ div (add $node.startupSeconds 4) 5 }}
          # A busy node is alive: only the port is asked for, which the kernel answers. A node whose engine fails or hangs
          # (--step-timeout) ends by itself.
          livenessProbe:
            tcpSocket: { port: metrics }
            periodSeconds: 20
            timeoutSeconds: 5
            failureThreshold: 6
          # Generous too: a node that is not ready leaves DNS, and routers move its requests elsewhere.
          readinessProbe:
            httpGet: { path: /health, port: metrics }
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
          {{- $resources := deepCopy $node.resources }}
          {{- $extended := dict }}
          {{- if $node.gpus }}{{ $_ := set $extended $node.gpuResource (toString $node.gpus) }}{{ end }}
          {{- if $node.rdma.enabled }}{{ $_ := set $extended $node.rdma.resource (toString $node.rdma.count) }}{{ end }}
          resources:
            requests: {{- toYaml (merge (dict) $extended ($resources.requests | default dict)) | nindent 14 }}
            limits: {{- toYaml (merge (dict) $extended ($resources.limits | default dict)) | nindent 14 }}
          securityContext:
            {{- include "baton.containerSecurity" $root | nindent 12 }}
              {{- if $node.rdma.enabled }}
              add: [IPC_LOCK] # memory that RDMA reads and writes is pinned
              {{- end }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            - { name: shm, mountPath: /dev/shm }
            - { name: models, mountPath: /models, readOnly: {{ $root.Values.models.readOnly }} }
            {{- if $cluster }}
            - { name: cluster-secret, mountPath: /etc/baton/cluster, readOnly: true }
            {{- end }}
      volumes:
        - { name: tmp, emptyDir: {} }
        - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ $node.shmSize }} } }
        - name: models
          {{- toYaml ($root.Values.models.volume | default (dict "emptyDir" (dict))) | nindent 10 }}
        {{- if $cluster }}
        - name: cluster-secret
          secret:
            secretName: {{ $cluster }}
            defaultMode: 0440
            items: [{ key: {{ $root.Values.clusterSecret.key }}, path: secret }]
        {{- end }}
      {{- with $node.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $node.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $node.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $node.topologySpreadConstraints }}
      topologySpreadConstraints: {{- toYaml . | nindent 8 }}
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
