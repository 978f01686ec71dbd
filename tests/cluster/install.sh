#!/usr/bin/env bash
# System packages of tests/cluster on Debian or Ubuntu: Slurm with its headers, a C compiler, namespaces, an image builder.
#
#   bash tests/cluster/install.sh     as root; does nothing when all are there
set -euo pipefail
packages=(slurm-wlm munge libslurm-dev gcc libc6-dev iproute2 util-linux procps podman runc mmdebstrap shellcheck)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q '^install ok' || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
echo "==> installing system packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
for attempt in 1 2 3; do # mirrors have bad moments
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && exit 0
    [ "$attempt" = 3 ] || sleep 10
done
exit 1
