#!/bin/sh
# The untimed build step of a graded run: sh setup.sh
#
# Compiles what a first start would compile (Triton kernels on a card, C layers on a CPU) into the user's caches. Needs no
# network, changes nothing beside this file, and never fails a run: start_server.sh works without it.
#
# With FORETOKEN_WEIGHTS_CACHE=DIR (for this script and for start_server.sh) a card's packed weights are kept in DIR too.
# That is off unless asked for: it takes the disk another 4 GB for a model of 4 B parameters in int8, and saves only the
# half of the checkpoint's bytes that a start then need not read, which is much on a slow disk and little on a quick one.
set -u

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
PYTHONSAFEPATH=1
PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE

# Compilers keep their caches below HOME, and a sandbox may have none that can be written.
if [ ! -w "${HOME:-}" ]; then
    HOME=${TMPDIR:-/tmp}/foretoken-$(id -u)
    mkdir -m 700 "$HOME" 2>/dev/null || :
    if [ ! -O "$HOME" ]; then # somebody else's: what lies there would be run
        HOME=$(mktemp -d) || HOME=/
    fi
    export HOME
fi

# The interpreter that start_server.sh will use, by the same packages.
check_packages='
import sys
from importlib.util import find_spec
specs = [find_spec(name) for name in sys.argv[1:]]
sys.exit(sys.version_info < (3, 10) or any(spec is None or spec.origin is None for spec in specs))
'
for python in python3 "$root/.venv/bin/python" ""; do
    if [ -z "$python" ]; then
        printf 'setup: no python here has what the server imports; nothing to compile\n'
        exit 0
    fi
    "$python" -c "$check_packages" torch tokenizers safetensors numpy fastapi uvicorn pydantic >/dev/null 2>&1 && break
done
"$python" -m serve.warm || printf 'setup: not everything could be prepared; the start will do it\n'
exit 0
