# The serving container, for CUDA or, with DEVICE=cpu, for CPUs. docs/deploy.md has the commands.
#
# BASE must be Debian 12: the pinned versions are for its Python 3.11. To install packages from another
# index, pass a pip.conf: --secret id=pip,src=pip.conf
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG DEVICE=cuda
# PyTorch's index of CPU wheels, for DEVICE=cpu: torch from other indexes includes CUDA.
ARG TORCH_INDEX=
# Debian drops old versions, so pinning would break the build.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && python3 -m venv /opt/longshore
WORKDIR /src

# Dependencies come first: they are most of the image, change rarely and stay cached.
COPY packaging/image/requirements.py constraints.txt pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 requirements.py "${DEVICE}" > requirements.txt \
 && /opt/longshore/bin/pip install --no-cache-dir --no-compile \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        --constraint constraints.txt --requirement requirements.txt \
 && if [ "${DEVICE}" = cpu ] && [ -d /opt/longshore/lib/python3.11/site-packages/nvidia ]; then \
        echo "torch includes CUDA: pass an index of CPU wheels, --build-arg TORCH_INDEX=..." >&2; \
        exit 1; \
    fi
COPY packaging/image/cut.py ./
RUN /opt/longshore/bin/python cut.py "${DEVICE}"

COPY README.md LICENSE ./
COPY packaging/wheel packaging/wheel
COPY longshore longshore
COPY core core
COPY strategies strategies
COPY kernels kernels
COPY engine engine
COPY container container
COPY loadtest loadtest
COPY benchmarks benchmarks
COPY deploy deploy
COPY models/demo models/demo
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/longshore/bin/pip install --no-cache-dir --no-compile --no-deps .

# Precompile the kernels for all GPUs, with the one C module for which Triton would need a compiler at
# run time, or the kernels for all CPUs.
WORKDIR /
ENV TRITON_CACHE_DIR=/opt/longshore/triton TRITON_STORE_BINARY_ONLY=1 \
    LONGSHORE_CACHE=/opt/longshore/kernels
RUN mkdir --mode=1777 "${TRITON_CACHE_DIR}" \
 && case "${DEVICE}" in \
        cuda) /opt/longshore/bin/python -m longshore.kernels.precompile ;; \
        cpu) /opt/longshore/bin/python -m longshore.kernels.cpu ;; \
    esac

# Start once, to cache the bytecode of exactly those modules that a start imports.
RUN /opt/longshore/bin/python -c "from longshore.container.front_end import app, start; \
from longshore.container.launch import supervisor; from longshore.container.multi_model import server; \
from longshore.container.model_files.directory import default_model_dir; from longshore import LLM; \
print(LLM(str(default_model_dir())).generate(['ROMEO:'])[0].outputs[0].text)"

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && useradd --uid 1000 --create-home longshore
COPY --from=build /opt/longshore /opt/longshore
# The NVIDIA_* variables make NVIDIA's runtime mount the driver. The download cache is below /tmp,
# because the model directory is read-only.
ENV PATH=/opt/longshore/bin:${PATH} \
    HF_HOME=/tmp/.cache/huggingface \
    TRITON_CACHE_DIR=/opt/longshore/triton \
    TRITON_STORE_BINARY_ONLY=1 \
    LONGSHORE_CACHE=/opt/longshore/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming=true \
      com.amazonaws.sagemaker.capabilities.multi-models=true
# A number, so that Kubernetes' runAsNonRoot accepts it. Only /tmp and /dev/shm are written.
USER 1000
EXPOSE 8080
# Process 1 gets no signal before it has a handler, and Python needs some 0.1 s for that.
ENTRYPOINT ["tini", "--", "longshore"]
CMD ["serve"]
