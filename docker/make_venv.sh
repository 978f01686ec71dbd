#!/usr/bin/env bash
# Makes the image's virtual environment, run by the Dockerfile: bash docker/make_venv.sh FOLDER [pip install options]
#
#   DS_OPS                 DeepSpeed ops to compile, e.g. "fused_adam cpu_adam"; only where there is nvcc
#   TORCH_CUDA_ARCH_LIST   GPUs they are compiled for, e.g. "8.0;9.0"
set -euo pipefail
venv=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "==> $*"; }

fail() {
    printf '%s\n' "error: $*" >&2
    exit 2
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "the base image needs python3 of 3.11 or newer"
torch_from=$(python3 docker/requirements.py "$venv")
options=()
[ "$torch_from" = base ] && options+=(--system-site-packages)
# A base may have pip but not Debian's ensurepip; the venv then sees the base's pip.
python3 -m venv "${options[@]}" "$venv" || python3 -m venv --without-pip "${options[@]}" "$venv"
"$venv/bin/python" -m pip --version >/dev/null || fail "the base image needs python3-venv or, beside its own torch, pip"

# In place of the base's own constraints: NGC sets PIP_CONSTRAINT to pins of its own, some of which contradict ours.
export PIP_CONSTRAINT=$venv/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
say "torch: from $torch_from, $(grep '^torch==' "$PIP_CONSTRAINT")"
# --use-pep517: an old pip would run DeepSpeed's setup.py with torch in sight and a new one does not; without torch it
# compiles nothing.
"$venv/bin/python" -m pip install --quiet --use-pep517 --requirement "$venv/requirements.txt" "$@"

cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "none")')
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PATH="$venv/bin:$PATH"
if [ -z "${DS_OPS:-}" ]; then
    say "DeepSpeed ops: none asked for"
elif ! nvcc=$(command -v nvcc || command -v "$CUDA_HOME/bin/nvcc"); then
    say "DeepSpeed ops: skipped ($DS_OPS), the base has no nvcc; DeepSpeed compiles them at first use, if ever"
elif [ "$cuda" = none ]; then
    say "DeepSpeed ops: skipped ($DS_OPS), this torch is built without CUDA"
else
    say "DeepSpeed ops: $DS_OPS for $TORCH_CUDA_ARCH_LIST with $nvcc and torch's CUDA $cuda"
    for op in $DS_OPS; do
        export "DS_BUILD_${op^^}=1"
    done
    # Without DS_ACCELERATOR DeepSpeed takes a build machine without a GPU for one that will never have any.
    DS_ACCELERATOR=cuda "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
        --no-binary deepspeed deepspeed
    for op in $DS_OPS; do
        "$venv/bin/python" -c 'import sys; from deepspeed.git_version_info import installed_ops as ops
sys.exit(not ops[sys.argv[1]])' "$op" || fail "DeepSpeed op $op was not built"
    done
fi
