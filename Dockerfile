# docker build -t ckpttool .
# docker run --rm -v "$PWD:/data" -u "$(id -u):$(id -g)" ckpttool inspect checkpoint/
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ckpttool ckpttool
COPY docs docs
COPY man man
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[crypto]'
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["ckpttool"]
