# docker build -f docker/cuda.Dockerfile -t cpvt_pyramid:cuda .
# docker run --rm --gpus all --shm-size 8g cpvt_pyramid:cuda
# CUDA 13.0 is that of the pinned torch; GPU=8.6 compiles for one architecture only.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
COPY --from=ghcr.io/astral-sh/uv:0.9.5 /uv /usr/local/bin/uv
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/* \
    && uv python install 3.11
WORKDIR /opt/cpvt_pyramid
COPY . .
ARG GPU="7.5;8.0;8.6;8.9;9.0+PTX"
RUN PYTHON="$(uv python find 3.11)" FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST="$GPU" UV_NO_CACHE=1 make setup \
    && rm -rf ~/.cache
ENV PATH=/opt/cpvt_pyramid/.venv/bin:$PATH
CMD ["python", "-m", "cpvt_pyramid.app.doctor"]
