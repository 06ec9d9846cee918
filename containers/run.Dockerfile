# To run engines and ONNX files only: build, evaluate, draw, benchmark, inspect. Without upstream, training and export.
#
#     docker build -f containers/run.Dockerfile -t yolov9-int8-run .
#     docker build -f containers/run.Dockerfile -t yolov9-int8-run --build-arg "TENSORRT=tensorrt==10.3.0" .
#
# docs/containers.md says which TensorRT goes with what.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# what pip installs TensorRT by; "none" leaves it out, for ONNX files on a CPU
ARG TENSORRT="tensorrt>=10.0"
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/overlay
COPY install_dependencies.sh ./
COPY requirements/ requirements/
COPY scripts/lib.sh scripts/environment.py scripts/
# hadolint ignore=DL3013
RUN PYTHON=python3 ./install_dependencies.sh --system --runtime && \
    if [ "$TENSORRT" != none ]; then python3 -m pip install "$TENSORRT"; fi

COPY val_trt.py LICENSE NOTICE ./
COPY models/ models/
COPY utils/ utils/
COPY scripts/ scripts/

# results go to /data, which is to be mounted; nothing else is written
RUN useradd --create-home --uid 1000 engine && mkdir -p /data && chown engine /data
USER 1000
WORKDIR /data
ENV PYTHONPATH=/opt/overlay
ENTRYPOINT ["python3"]
CMD ["/opt/overlay/val_trt.py", "-h"]
