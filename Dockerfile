# An image of hotbed: docker build --tag hotbed . ; docker run --rm hotbed doctor
# TORCH_INDEX: where torch comes from, such as https://download.pytorch.org/whl/cu128 for GPUs.
FROM debian:bookworm-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv libgomp1 \
 && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE /hotbed/
COPY src /hotbed/src
WORKDIR /hotbed

RUN python3 -m venv /opt/hotbed \
 && /opt/hotbed/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
 && /opt/hotbed/bin/pip install --no-cache-dir --constraint constraints.txt .

# Compiled kernels are for processors of the kind that builds the image; others compile at their first step.
ENV PATH=/opt/hotbed/bin:$PATH XDG_CACHE_HOME=/opt/cache
RUN hotbed warm-up && chmod -R a+rwX /opt/cache

WORKDIR /work
ENTRYPOINT ["hotbed"]
