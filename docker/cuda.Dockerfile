# docker build -f docker/cuda.Dockerfile -t cpvt_pyramid:cuda .
# docker run --rm --gpus all --shm-size 8g cpvt_pyramid:cuda
# torch brings CUDA's libraries; the machine needs NVIDIA's driver and container toolkit.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/cpvt_pyramid
COPY . .
RUN UV_NO_CACHE=1 make setup && rm -rf ~/.cache
ENV PATH=/opt/cpvt_pyramid/.venv/bin:$PATH
CMD ["python", "-m", "cpvt_pyramid.app.doctor"]
