#!/usr/bin/env bash
# Builds the image with true labels. Arguments go to the engine's `build`.
#
#   bash docker/build.sh                                                          on the default base
#   BASE_IMAGE=python:3.11-slim IMAGE=mars-ds:cpu bash docker/build.sh            on another
#   ENGINE=podman bash docker/build.sh --build-arg DS_OPS="fused_adam cpu_adam"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
engine=${ENGINE:-docker}
base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)}

pinned() { sed -n "s/^$1==//p" constraints.txt; }

version=$(sed -n 's/^ *version="\(.*\)",$/\1/p' setup.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-modified
# The torch of the base, if it has one; else the pinned one, of which the package index decides the build (+cpu, ...).
torch=$("$engine" run --rm --entrypoint python3 "$base" -c 'from importlib.metadata import version
try: print(version("torch"))
except ImportError: pass')
exec "$engine" build --file docker/Dockerfile --tag "${IMAGE:-mars-ds:$version}" \
    --build-arg BASE_IMAGE="$base" \
    --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" \
    --build-arg CREATED="$(date -u +%FT%TZ)" \
    --build-arg TORCH_VERSION="${torch:-$(pinned torch)}" \
    --build-arg DEEPSPEED_VERSION="$(pinned deepspeed)" \
    "$@" .
