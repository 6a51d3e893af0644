#!/bin/sh
# Sets up .venv and the default model, then runs the tests: sh scripts/test.sh [--setup-only] [options of pytest]
# Paths among the options are relative to the project folder.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
sh scripts/setup_venv.sh dev
.venv/bin/python scripts/fetch_default_model.py
if [ "${1:-}" = --setup-only ]; then
    exit 0
fi
exec .venv/bin/python -m pytest "$@"
