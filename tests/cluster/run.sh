#!/usr/bin/env bash
# The tests that need a cluster and an image builder, both real: Slurm on several virtual nodes, and the shipped Dockerfile.
#
#   bash tests/cluster/run.sh [pytest arguments]
#
# As root on Debian or Ubuntu it installs what it needs. Where namespaces are not allowed, tests skip and say why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/environment.sh
make_environment dev
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    bash tests/cluster/install.sh
else
    say "not root, or no apt-get: tests whose programs are missing will be skipped (see tests/cluster/install.sh)"
fi
exec python -m pytest -rs tests/cluster "$@"
