# syntax=docker/dockerfile:1
# rlxf with torch for CPUs or, without TORCH_INDEX, for CUDA. The build runs scripts/demo.py, about ten minutes: a broken demo
# breaks the build.
#
#   docker build --tag rlxf --build-arg TORCH_INDEX=URL .
#   docker run --rm rlxf --version
#   docker run --rm --volume "$PWD/runs:/home/rlxf/runs" rlxf train gtrxl --env CartPole-v1 --run runs/first
#
# URL is the package index of torch's builds for CPUs, which pytorch.org names; without it, pip installs the larger build with CUDA.
# The container runs as user 1000, who must be allowed to write to a folder that is mounted.

FROM python:3.11-slim AS package
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/rlxf
# pip prefers the CPU build: its local version +cpu is newer than the same version without one.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY rlxf rlxf
RUN pip install --no-cache-dir --constraint constraints.txt '.[memory]' \
    && rm -r /opt/rlxf \
    && useradd --create-home --uid 1000 rlxf
USER 1000
WORKDIR /home/rlxf

# Its exit status is 1 if an agent does not reach its goal.
FROM package AS demo
COPY scripts /tmp/scripts
RUN python /tmp/scripts/demo.py --run /tmp/demo

FROM package
# The pictures make the image depend on the demo, which BuildKit would skip otherwise.
COPY --from=demo /tmp/demo/curve.png /tmp/demo/target_returns.png /usr/share/doc/rlxf/demo/
ENTRYPOINT ["rlxf"]
CMD ["--help"]
