#!/bin/sh
# Starts the server: sh start_server.sh [options of python -m serve]
#
#   MODEL_DIR        folder of the model; without it the default model is built once and served
#   PORT             port to listen on (8000)
#   DRAFTER_BYO_DIR  folder of a block drafter; one that does not fit is reported and left out
#
# Where python3 already has the packages the server needs, that interpreter runs it: nothing is installed and no network
# is touched. Otherwise .venv is made beside this file with pinned versions.
set -eu

# Where one of the three is closed, the server's first socket would take its place.
(: 9<&0) 2>/dev/null || exec </dev/null
(: 9>&1) 2>/dev/null || exec >/dev/null
(: 9>&2) || exec 2>/dev/null

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
default_model=$root/models/smollm2-135m-instruct
default_drafter=$root/drafter_train/releases/smollm2-135m-instruct

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# True when the interpreter $1 is new enough and finds every package named after it. Imports none of them: quick.
has() {
    "$@" >/dev/null 2>&1
}
check_packages='
import sys
from importlib.util import find_spec
specs = [find_spec(name) for name in sys.argv[1:]]
sys.exit(sys.version_info < (3, 10) or any(spec is None or spec.origin is None for spec in specs))
'

PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
PYTHONSAFEPATH=1 # a folder called "serve" where the caller stands is not ours
export PYTHONPATH PYTHONSAFEPATH
if [ ! -w "$root" ]; then
    PYTHONDONTWRITEBYTECODE=1
    export PYTHONDONTWRITEBYTECODE
fi

# Compilers keep their caches below HOME, and a sandbox may have none that can be written.
if [ ! -w "${HOME:-}" ]; then
    HOME=${TMPDIR:-/tmp}/foretoken-$(id -u)
    mkdir -m 700 "$HOME" 2>/dev/null || :
    if [ ! -O "$HOME" ]; then # somebody else's: what lies there would be run
        HOME=$(mktemp -d) || HOME=/
    fi
    export HOME
fi

wants_model=${MODEL_DIR:-}
wants_drafter=${DRAFTER_BYO_DIR:-}
for argument in "$@"; do
    case $argument in
        -h | --help)
            command -v python3 >/dev/null 2>&1 || die "python3 is not installed; Python 3.10 or newer is needed"
            exec python3 -c 'from serve.config import build_parser; build_parser().print_help()'
            ;;
        --mo*) wants_model=given ;;
        --draf* | --pro*) wants_drafter=given ;;
    esac
done
if [ -n "${MODEL_DIR:-}" ] && [ ! -f "$MODEL_DIR/config.json" ]; then
    die "MODEL_DIR=$MODEL_DIR has no config.json"
fi

if has python3 -c "$check_packages" torch tokenizers safetensors numpy fastapi uvicorn pydantic; then
    python=python3
else
    sh "$root/scripts/setup_venv.sh" serve
    python=$root/.venv/bin/python
fi

if [ -z "$wants_model" ]; then
    fetch=$root/scripts/fetch_default_model.py
    if ! "$python" "$fetch" --check; then
        builder=$python
        if ! has "$python" -c "$check_packages" gguf tokenizers numpy pip; then
            sh "$root/scripts/setup_venv.sh" model # never into a python that is not ours
            builder=$root/.venv/bin/python
        fi
        "$builder" "$fetch"
    fi
    MODEL_DIR=$default_model
    export MODEL_DIR
    if [ -z "$wants_drafter" ] && [ -f "$default_drafter/config.json" ]; then
        set -- --drafter-dir "$default_drafter" "$@"
    fi
fi

exec "$python" -m serve "$@"
