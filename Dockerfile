# The serving container, for CUDA or (DEVICE=cpu) without: docs/deploy.md has the commands.
#
# BASE must be Debian 12, whose Python is the 3.11 that the pinned versions are for. Where packages
# come from other places than the public ones, pass a pip.conf: --secret id=pip,src=pip.conf
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG DEVICE=cuda
# PyTorch's index of CPU wheels, for DEVICE=cpu: elsewhere torch comes with CUDA.
ARG TORCH_INDEX=
# Debian keeps no old versions that one could pin.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && python3 -m venv /opt/longshore
WORKDIR /src

# What changes seldom comes first: it is most of the image, and stays cached.
COPY image/requirements.py constraints.txt pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 requirements.py "${DEVICE}" > requirements.txt \
 && /opt/longshore/bin/pip install --no-cache-dir --no-compile \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        --constraint constraints.txt --requirement requirements.txt \
 && if [ "${DEVICE}" = cpu ] && [ -d /opt/longshore/lib/python3.11/site-packages/nvidia ]; then \
        echo "torch came with CUDA: name an index of CPU wheels, --build-arg TORCH_INDEX=..." >&2; \
        exit 1; \
    fi
COPY image/cut.py ./
RUN /opt/longshore/bin/python cut.py "${DEVICE}"

COPY README.md ./
COPY core core
COPY strategies strategies
COPY kernels kernels
COPY engine engine
COPY container container
COPY djl_python djl_python
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/longshore/bin/pip install --no-cache-dir --no-compile --no-deps .

# Kernels for every GPU, with the one C module that Triton would need a compiler for at run time, or
# those for every CPU.
WORKDIR /
ENV TRITON_CACHE_DIR=/opt/longshore/triton TRITON_STORE_BINARY_ONLY=1 \
    LONGSHORE_CACHE=/opt/longshore/kernels
RUN mkdir --mode=1777 "${TRITON_CACHE_DIR}" \
 && case "${DEVICE}" in \
        cuda) /opt/longshore/bin/python -m kernels.precompile ;; \
        cpu) /opt/longshore/bin/python -m kernels.cpu ;; \
    esac

# A first start, which leaves the bytecode of what a start loads, and of nothing else.
COPY models/demo /demo
RUN /opt/longshore/bin/python -c "import container.front_end.app, container.front_end.start, container.launch.supervisor, container.multi_model.server; \
from engine import LLM; print(LLM('/demo').generate(['ROMEO:'])[0].outputs[0].text)"

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=build /opt/longshore /opt/longshore
# The variables of NVIDIA's runtime have it bring the driver in; what is cached goes below /tmp, as
# the model's directory is read-only.
ENV PATH=/opt/longshore/bin:${PATH} \
    HF_HOME=/tmp/.cache/huggingface \
    TRITON_CACHE_DIR=/opt/longshore/triton \
    TRITON_STORE_BINARY_ONLY=1 \
    LONGSHORE_CACHE=/opt/longshore/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true \
      com.amazonaws.sagemaker.capabilities.multi-models=true
EXPOSE 8080
ENTRYPOINT ["python", "-m", "container"]
CMD ["serve"]
