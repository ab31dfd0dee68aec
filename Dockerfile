# One image for everything that compose.yaml runs: backbone, workers, broker. Nothing secret is in it.
#
# BASE is a Debian 12 with Python 3.11 and its venv module.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# gcc compiles the native kernels for the CPU that they land on; PoCL is OpenCL on the CPU: for a GPU, its own driver
# takes that place.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      curl gcc libc6-dev mosquitto mosquitto-clients ocl-icd-libopencl1 openssl pocl-opencl-icd \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/expertswarm
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY archdefs archdefs
COPY kernels kernels
COPY worker worker
COPY backbone backbone
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir ".[serve,mqtt,opencl]"
COPY deploy deploy

# A volume that is mounted over one of these folders begins as its owner's.
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin expertswarm \
 && install -d -m 0700 -o expertswarm -g expertswarm /state /cache /mosquitto/config /keys/backbone /keys/workers
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/state XDG_STATE_HOME=/state XDG_CACHE_HOME=/cache POCL_CACHE_DIR=/cache/pocl PYTHONUNBUFFERED=1
WORKDIR /state
USER 10001:10001
CMD ["backbone", "--help"]
