{{/* What a pod of nodes is made of, in a StatefulSet as in a LeaderWorkerSet; takes what baton.node takes, and `host`, what the pod is
of a group of several: leader or worker. Workers have ranks alone: no port but those at which ranks meet, and no pages. Nor do they need
probes: their leader ends when one of them ends or hangs. */}}
{{- define "baton.nodePod" }}
{{- $root := .root }}
{{- $node := .node }}
{{- $name := include "baton.fullname" .root }}
{{- $cluster := include "baton.clusterSecret" .root }}
{{- $tls := .root.Values.clusterTls.existingSecret }}
{{- $who := dict "root" .root "component" .role }}
{{- $host := get . "host" }}
{{- $serves := ne $host "worker" }}
metadata:
  labels: {{- include "baton.selector" $who | nindent 4 }}
  {{- with merge (dict) $node.podAnnotations (ternary $node.rdma.annotations (dict) $node.rdma.enabled) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # SIGTERM drains: running requests move to other nodes or end. Then the engine's thread has ten seconds. Sent to a worker, it drains
  # the node all the same.
  terminationGracePeriodSeconds: {{ add (ceil $root.Values.drainTimeout) 30 }}
  securityContext: {{- include "baton.podSecurity" $root | nindent 4 }}
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
        {{- if $serves }}
        - --listen={{ ternary "[$(POD_IP)]" "$(POD_IP)" $root.Values.ipv6 }}:9000
        - --metrics-port=9100
        {{- end }}
        - --device={{ $node.device }}
        - --drain-timeout={{ $root.Values.drainTimeout }}
        - --log-format={{ $root.Values.logFormat }}
        {{- if $cluster }}
        - --cluster-secret-file=/etc/baton/cluster/secret
        {{- end }}
        {{- if $host }}
        - --nnodes={{ .pool.size }}
        - --node-rank={{ ternary "0" "$(LWS_WORKER_INDEX)" $serves }}
        # the leader listens before DNS has its name
        - --master-addr={{ ternary "$(POD_IP)" "$(LWS_LEADER_ADDRESS)" $serves }}
        - --master-port=29501
        # less than the startup probe allows: the log says which pod is missing
        - --distributed-timeout-seconds={{ div (mul 9 $node.startupSeconds) 10 }}
        {{- end }}
        {{- if and $tls $serves }}
        # by name: one certificate with a wildcard stands for all pods, whatever their addresses
        - --advertise=$(POD_NAME).{{ $name }}-{{ .role }}.{{ $root.Release.Namespace }}.svc:9000
        {{- include "baton.clusterTlsArgs" $root | nindent 8 }}
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
        {{- range $key, $value := $node.env }}
        - { name: {{ $key }}, value: {{ $value | quote }} }
        {{- end }}
        {{- with $root.Values.models.hubTokenSecret }}
        {{- if .name }}
        - { name: HF_TOKEN, valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } } }
        {{- end }}
        {{- end }}
      {{- if $serves }}
      ports:
        - { name: grpc, containerPort: 9000 }
        - { name: metrics, containerPort: 9100 }
        {{- if $host }}
        - { name: master, containerPort: 29501 }
        {{- end }}
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
      {{- end }}
      {{- $resources := deepCopy $node.resources }}
      {{- $extended := dict }}
      {{- if $node.gpus }}{{ $_ := set $extended $node.gpuResource (toString $node.gpus) }}{{ end }}
      {{- if $node.rdma.enabled }}{{ $_ := set $extended $node.rdma.resource (toString $node.rdma.count) }}{{ end }}
      resources:
        requests: {{- toYaml (merge (dict) $extended ($resources.requests | default dict)) | nindent 10 }}
        limits: {{- toYaml (merge (dict) $extended ($resources.limits | default dict)) | nindent 10 }}
      securityContext:
        {{- include "baton.containerSecurity" $root | nindent 8 }}
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
        {{- if and $tls $serves }}
        - { name: cluster-tls, mountPath: /etc/baton/cluster-tls, readOnly: true }
        {{- end }}
  volumes:
    - { name: tmp, emptyDir: {} }
    - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ $node.shmSize }} } }
    - name: models
      {{- toYaml ($root.Values.models.volume | default (dict "emptyDir" (dict))) | nindent 6 }}
    {{- if $cluster }}
    - name: cluster-secret
      secret:
        secretName: {{ $cluster }}
        defaultMode: 0440
        items: [{ key: {{ $root.Values.clusterSecret.key }}, path: secret }]
    {{- end }}
    {{- if and $tls $serves }}
    - name: cluster-tls
      {{- include "baton.clusterTlsVolume" $root | nindent 6 }}
    {{- end }}
  {{- with $node.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $node.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $node.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $node.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
