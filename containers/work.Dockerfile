# To work in: upstream YOLOv9 patched with this overlay, and all that quantizing, training, exporting and building needs.
#
#     docker build -f containers/work.Dockerfile -t yolov9-int8 .
#     docker build -f containers/work.Dockerfile -t yolov9-int8 --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
#
# docs/containers.md says which base has which TensorRT.
ARG BASE=nvcr.io/nvidia/pytorch:25.12-py3
# hadolint ignore=DL3006
FROM ${BASE}

# what pip installs TensorRT by, such as "tensorrt>=10.13,<10.14"; empty: the base's, or the newest where it has none;
# "none" leaves it out
ARG TENSORRT=""
ENV DEBIAN_FRONTEND=noninteractive PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video

# gcc is for torch.compile and Triton's kernels; a base that has these packages keeps its own
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3 python3-dev python3-pip && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /opt/overlay
# What decides what is installed; a change elsewhere builds on the same packages.
COPY install_dependencies.sh ./
COPY requirements/ requirements/
COPY scripts/lib.sh scripts/environment.py scripts/
# A torch of the base that is new enough stays (--system). TensorRT is installed by name: a build sees no GPU.
# hadolint ignore=DL3013
RUN PYTHON=python3 ./install_dependencies.sh --system && \
    if [ -z "$TENSORRT" ] && python3 -c 'import tensorrt'; then exit; fi && \
    if [ "$TENSORRT" != none ]; then python3 -m pip install "${TENSORRT:-tensorrt>=10.0}"; fi

COPY . .
RUN scripts/get_yolov9.sh /opt/yolov9 && ./patch_yolov9.sh /opt/yolov9 && chmod -R a+rwX /opt/yolov9

WORKDIR /opt/yolov9
CMD ["bash"]
