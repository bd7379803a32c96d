# syntax=docker/dockerfile:1

# Both stages must use the same interpreter, because the virtual environment links to it. A tag can be moved. For a
# reproducible build, add the digest, which only the registry knows:
#   docker buildx imagetools inspect python:3.13.16-slim-trixie
#   docker build --build-arg PYTHON_IMAGE=python:3.13.16-slim-trixie@sha256:… .
ARG PYTHON_IMAGE=python:3.13.16-slim-trixie

# ---- build: the wheel, and the environment it is installed into -----------------------------------------------------
FROM ${PYTHON_IMAGE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

# Dependencies without a wheel for this platform (faust-streaming on arm64) are compiled. The runtime has no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY requirements ./requirements
COPY pyproject.toml README.md LICENSE ./
COPY contracts ./contracts
COPY schemas ./schemas
COPY streams ./streams

# runtime: what a worker needs. embedder: also the packages of all providers, for `anabranch embedder`.
ARG REQUIREMENTS=runtime

# The environment has no pip: nothing can be installed into a running container. pip compiles to bytecode at build time,
# because the root file system is read-only at run time. requirements/ pins what is installed, by hash.
RUN python -m pip install --require-hashes --requirement requirements/build.txt \
    && python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/anabranch \
    && python -m pip --python /opt/anabranch/bin/python install --require-hashes --requirement requirements/${REQUIREMENTS}.txt \
    && python -m pip --python /opt/anabranch/bin/python install --no-deps /wheels/anabranch-*.whl \
    && python requirements/sbom.py /opt/anabranch/lib/python3.*/site-packages requirements/${REQUIREMENTS}.txt \
       > /opt/anabranch/anabranch.cdx.json

# ---- runtime --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime

# Set these when you build: the version of the distribution, the commit, and the time in RFC 3339.
ARG PYTHON_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="anabranch" \
      org.opencontainers.image.description="Query embeddings in, ranked and budgeted passages out, over Kafka and pgvector" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Anabranch developers" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="docker.io/library/${PYTHON_IMAGE}"

# USER below is a number: Kubernetes cannot verify runAsNonRoot for a name.
RUN groupadd --gid 10001 anabranch \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin anabranch

COPY --from=build /opt/anabranch /opt/anabranch

ENV PATH=/opt/anabranch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# The process writes only to /tmp: if the root file system is read-only, mount a writable file system there.
WORKDIR /tmp
USER 10001:10001

EXPOSE 6066

# http.client, not urllib: proxy variables must not redirect the request.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('ANABRANCH_WEB_PORT') or 6066), timeout=2); c.request('GET', '/healthz/live'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["anabranch"]
CMD ["worker"]
