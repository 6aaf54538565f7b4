# docker build -f docker/cpu.Dockerfile -t cpvt_pyramid .
# docker run --rm cpvt_pyramid
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/cpvt_pyramid
COPY . .
RUN UV_NO_CACHE=1 make setup TORCH=cpu && rm -rf ~/.cache
ENV PATH=/opt/cpvt_pyramid/.venv/bin:$PATH
CMD ["python", "-m", "cpvt_pyramid.app.doctor"]
