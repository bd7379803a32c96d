# syntax=docker/dockerfile:1

# One version, named once: both stages must run the very same interpreter, because the virtual environment links to it.
ARG PYTHON_IMAGE=python:3.13.16-slim-trixie

# ---- build: the wheel, and the environment it is installed into -----------------------------------------------------
FROM ${PYTHON_IMAGE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

# A dependency without a wheel for this machine (faust-streaming on arm64) is compiled. None of this is in the runtime.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY contracts ./contracts
COPY schemas ./schemas
COPY streams ./streams

# The environment has no pip of its own: nothing can be installed into a running container. pip compiles to bytecode
# here, since the root file system is read-only where it runs.
RUN python -m pip wheel --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/anabranch \
    && python -m pip --python /opt/anabranch/bin/python install /wheels/anabranch-*.whl

# ---- runtime --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime

LABEL org.opencontainers.image.title="anabranch" \
      org.opencontainers.image.description="Query embeddings in, ranked and budgeted passages out, over Kafka and pgvector" \
      org.opencontainers.image.licenses="Apache-2.0"

# A number, not a name, in USER below: Kubernetes can only verify runAsNonRoot on a number.
RUN groupadd --gid 10001 anabranch \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin anabranch

COPY --from=build /opt/anabranch /opt/anabranch

ENV PATH=/opt/anabranch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# The only place that is written to is /tmp: mount something there when the root file system is read-only.
WORKDIR /tmp
USER 10001:10001

EXPOSE 6066

# http.client and not urllib: no proxy variable can lead the request elsewhere.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('ANABRANCH_WEB_PORT') or 6066), timeout=2); c.request('GET', '/healthz/live'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["anabranch"]
CMD ["worker"]
