# syntax=docker/dockerfile:1
# The router: no torch, no CUDA. From the repository's root:
#
#   docker build -f deploy/docker/router.Dockerfile -t baton-router .
#   docker run --rm -p 8000:8000 baton-router --http 0.0.0.0:8000 --decode node:9000
#
# `python -m tools.image_size` measures its layers: they must stay under 400 MB.
FROM python:3.12-slim AS build

WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/baton && /opt/baton/bin/pip install --no-cache-dir -c constraints.txt setuptools
COPY . .
# without build isolation: setuptools too is the version of constraints.txt
RUN /opt/baton/bin/pip install --no-cache-dir --no-build-isolation -c constraints.txt '.[otlp]' \
    && /opt/baton/bin/pip uninstall --yes setuptools pip

FROM python:3.12-slim

# the id that the Helm chart runs it as
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid baton --no-create-home --home-dir /tmp baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=6 \
    CMD ["python", "-m", "deploy.healthy", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["baton", "router"]
