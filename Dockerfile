# docker build -t pmae .                                  for a CPU
# docker build -t pmae --build-arg TORCH=cu128 .          for NVIDIA GPUs, then: docker run --gpus all pmae
# docker run -v "$PWD/scans:/scans" -v "$PWD/runs:/pmae/runs" pmae .venv/bin/pmae pretrain --data /scans --out runs/scans
FROM python:3.11-slim
ARG TORCH=cpu
# Triton compiles a small piece of C for the GPU's driver.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /pmae
COPY pyproject.toml README.md LICENSE Makefile ./
COPY src src
RUN python -m venv .venv \
 && .venv/bin/pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/${TORCH} \
 && .venv/bin/pip install --no-cache-dir --editable . \
 && touch .venv/.installed
CMD ["make", "demo"]
