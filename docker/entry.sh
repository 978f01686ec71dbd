#!/bin/bash
# Entry point of the image: says in one line what is inside, then becomes the command, which so is process 1 and gets
# the signals itself. Nothing depends on it: batch systems may start the command without it.
set -euo pipefail

declare -A image
while IFS='=' read -r key value; do
    image[$key]=$value
done </opt/venv/image.txt

# A user id that the image does not know (--user 1234) has neither a home nor a name; caches want both.
if [ ! -w "${HOME:-/}" ]; then
    HOME=/tmp/home-$(id -u)
    mkdir -p "$HOME"
fi
USER=${USER:-$(id -un 2>/dev/null || echo "user-$(id -u)")}
export HOME USER

printf '%s\n' "mars-ds ${image[version]}, revision ${image[revision]}; torch ${image[torch]} from ${image[torch_from]};\
 cuda ${image[cuda]}; deepspeed ${image[deepspeed]}, ops ${image[deepspeed_ops]}; python ${image[python]}" >&2

# From the installer's records, without importing torch. A mounted folder, PYTHONPATH or a later pip can hide the torch
# for which everything here was built.
found=$(/opt/venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' || true)
if [ "$found" != "${image[torch]}" ]; then
    echo "error: torch ${found:-(none)} is found, but this image was built with ${image[torch]}; look at PYTHONPATH," \
        "mounts over /opt/venv, and what pip has installed since" >&2
    exit 2
fi
exec "$@"
