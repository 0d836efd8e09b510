# syntax=docker/dockerfile:1
# A prefill or a decode node: torch, transformers, UCX. From the repository's root:
#
#   docker build -f deploy/docker/node.Dockerfile -t baton-node .
#   docker run --rm --gpus all --shm-size 2g --ulimit memlock=-1 baton-node decode --model MODEL \
#       --listen 0.0.0.0:9000 --advertise HOST:9000
#
# For machines without a GPU, with the CPU build of torch (gigabytes less):
#
#   docker build -f deploy/docker/node.Dockerfile -t baton-node-cpu --build-arg BASE=ubuntu:24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# torch's packages bring CUDA's libraries with them, so the base needs only what the driver is found by.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE} AS build

ARG TORCH_INDEX=
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/baton && /opt/baton/bin/pip install --no-cache-dir -c constraints.txt setuptools
COPY . .
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} /opt/baton/bin/pip install --no-cache-dir --no-build-isolation -c constraints.txt \
        '.[node,otlp,kv-events]' \
    && /opt/baton/bin/pip uninstall --yes pip

FROM ${BASE}

# gcc and Python's headers: Triton compiles a small C file for each kernel's launcher, also while it runs
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton && useradd --uid 10001 --gid baton --no-create-home --home-dir /tmp baton \
    && install --directory --owner 10001 --group 10001 /models
COPY --from=build /opt/baton /opt/baton
# HF_HOME: downloads of hub ids; a volume keeps them. USER: torch asks for its name, and `docker run --user` may hide it.
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=baton HF_HOME=/models
# a fixed port of /metrics and /health, whatever --listen is
ENV BATON_METRICS_PORT=9100
USER 10001:10001
EXPOSE 9000 9100
STOPSIGNAL SIGTERM
# /health says 200 when the weights are loaded; it is on the host of --listen, which must be 0.0.0.0 for this check
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=6 \
    CMD ["python", "-m", "deploy.healthy", "http://127.0.0.1:9100/health"]
ENTRYPOINT ["baton"]
CMD ["--help"]
