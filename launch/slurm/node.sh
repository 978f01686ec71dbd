#!/usr/bin/env bash
# One on each node, started by srun in the container where there is one:
#
#   node.sh ATTEMPT ranks SCRIPT [ARGUMENT ...]              DeepSpeed's launcher without ssh, for this node's ranks
#   node.sh ATTEMPT data [OPTION ...]                        python -m data_pipeline prepare
#   node.sh ATTEMPT preflight RANKS [doctor's ARGUMENT ...]  launch/doctor.py; leaves ATTEMPT/preflight/NODE.healthy
#
# ATTEMPT is the folder that job.sh has made for this start of the job.
set -euo pipefail
# srun signals every process of the step, and DeepSpeed's launchers would die of this one; ranks set a handler of their own.
trap '' USR1
attempt=$1 mode=$2
shift 2
node=${SLURMD_NODENAME:-$(hostname)}

fail() {
    printf 'error: %s: %s\n' "$node" "$*" >&2
    sleep 1 # srun drops what it has not read when a task ends badly
    exit 2
}

[ -r "$attempt/environment" ] || fail "$attempt is not visible here; RUNS_DIR must be on a file system that every node sees"
# shellcheck source=/dev/null
source "$attempt/environment"
if [ "$mode" = preflight ]; then exec >"$attempt/preflight/$node.log" 2>&1; fi
# Files of modules and conda use variables that are not set, and commands that fail.
set +eu
eval "$NODE_SETUP"
set -eu
[ -x "$PYTHON" ] || fail "PYTHON: $PYTHON is no interpreter here"
export PATH="${PYTHON%/*}:$PATH" PYTHONUNBUFFERED=1
# Caches of compilers: on this node's own disk, kept from job to job.
scratch=${LOCAL_SCRATCH:-${TMPDIR:-/tmp}}/mars-ds-$(id -u)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/triton}
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$scratch/torch_extensions}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$scratch/inductor}
# RDMA pins memory, and a run keeps many files open; the site's hard limits decide.
ulimit -l unlimited 2>/dev/null || true
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

case $mode in
ranks)
    [ -r "$attempt/hostfile" ] || fail "$attempt/hostfile is not there"
    rank=$(awk -v node="$node" '$1 == node {print NR - 1}' "$attempt/hostfile")
    [ -n "$rank" ] || fail "is not in $attempt/hostfile"
    ranks=$(awk -F= -v node="$node slots" '$1 == node {print $2}' "$attempt/hostfile")
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
    getent hosts "$MASTER_ADDR" >/dev/null || fail "the master's name, $MASTER_ADDR, does not resolve here"
    exec "$PYTHON" -m deepspeed.launcher.runner --quiet --hostfile "$attempt/hostfile" --no_ssh --node_rank "$rank" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"
    ;;
data)
    exec "$PYTHON" -m data_pipeline prepare "$@"
    ;;
preflight)
    ranks=$1
    shift
    # Alone on the node: the variables of the step would make it wait for the others.
    if env -u SLURM_PROCID -u SLURM_STEP_ID timeout --kill-after=10 300 "$PYTHON" launch/doctor.py \
        --expect-devices "$ranks" "$@"; then
        : >"$attempt/preflight/$node.healthy"
    fi
    ;;
*) fail "unknown mode $mode" ;;
esac
