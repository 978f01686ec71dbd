# Makes the virtual environment of this checkout; sourced by launch/quickstart.sh and tests/run.sh.
#
#   make_environment [extra]   creates .venv with everything pinned in constraints.txt, or reuses it
#
# Needs Debian's (or any) Python 3.11 or newer. No compiler is needed: every dependency has a wheel or is pure
# Python, and DeepSpeed's optional CPU op is left unbuilt (mars_ds/zero/distributed.py says why).

say() { printf '%s\n' "==> $*"; }

fail() {
    printf '%s\n' "error: $*" >&2
    exit 2
}

need_system_packages() {
    local line="apt-get install -y --no-install-recommends $*"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing system packages: $*"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive $line >/dev/null || fail "could not run: $line"
    else
        fail "system packages are missing; run this once and start again:  sudo $line"
    fi
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

make_environment() {
    local extra="${1:-}" python stamp wanted
    python=$(find_python)
    if [ -z "$python" ]; then
        need_system_packages python3 python3-venv
        python=$(find_python)
        [ -n "$python" ] || fail "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need_system_packages python3-venv
    stamp=".venv/.ready${extra:+-$extra}"
    wanted=$(cat constraints.txt setup.py | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "installing the pinned environment into .venv (once; several minutes where torch is downloaded)"
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".${extra:+[$extra]}" ||
            fail "pip could not install the environment; its message is above"
        echo "$wanted" >"$stamp"
    fi
    # A console script finds its interpreter by PATH where the launcher starts `python`.
    PATH="$PWD/.venv/bin:$PATH"
    export PATH
    python -c 'from mars_ds.zero.distributed import refuse_unusable_gpu; refuse_unusable_gpu()' 2>/dev/null ||
        fail "$(python -c '
from mars_ds.errors import LaunchError
from mars_ds.zero.distributed import refuse_unusable_gpu
try:
    refuse_unusable_gpu()
except LaunchError as error:
    print(error)' 2>&1 | tail -n 1)"
}
