# Outrider's server on an NVIDIA GPU. The machine needs the driver and NVIDIA's container toolkit; CUDA's libraries come
# with torch. From the root of a clone:
#   docker build -f deploy/docker/cuda.Dockerfile -t outrider-cuda .
#   docker run --gpus all -p 8000:8000 -v outrider-models:/models outrider-cuda Qwen/Qwen2.5-Coder-1.5B-Instruct
# The volume keeps models, compiled kernels and measured costs. Set OUTRIDER_API_KEYS before others can reach the port.
# --build-arg PIP_EXTRA_INDEX_URL=... names an index with torch for another version of CUDA, TORCH=... that version.
FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="outrider" org.opencontainers.image.version="0.1.0"
# Debian 12 stays at Python 3.11. Triton compiles its launchers with gcc and the headers of python3-dev.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev libgomp1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home outrider \
    && install -d -o outrider -g outrider /models
ENV PATH=/opt/outrider/bin:$PATH
ARG TORCH=torch==2.11.0
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3013
RUN python3 -m venv /opt/outrider && pip install --no-cache-dir "$TORCH"
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[serve,gpu]' && rm -rf /src
# A number, so that Kubernetes can see that it is not root's.
USER 10001:10001
WORKDIR /home/outrider
ENV TRITON_CACHE_DIR=/models/triton NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV OUTRIDER_CACHE=/models HF_HOME=/models/huggingface
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=600s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["outrider", "serve", "--host", "0.0.0.0"]
CMD ["smollm2-135m"]
