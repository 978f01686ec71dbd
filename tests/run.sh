#!/usr/bin/env bash
# Runs the whole test suite in this checkout's own environment, which it makes when it is not there.
#
#   bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment dev
exec python -m pytest "$@"
