#!/bin/sh
# Sets up .venv and the default model, then runs the tests: sh scripts/test.sh [--setup-only] [options of pytest]
# Paths among the options are relative to the project folder.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
sh scripts/setup_venv.sh dev
.venv/bin/python scripts/fetch_default_model.py

# The page's tests drive a real Chromium: Debian's packages, put there when this is root and they are not.
has_browser() {
    command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1
}
if ! has_browser && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'installing chromium and chromium-driver for the browser tests\n' >&2
    apt-get update -qq >&2 || :
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >&2 || :
fi
if [ "${1:-}" = --setup-only ]; then
    exit 0
fi
if ! has_browser; then
    printf 'BROWSER TESTS LEFT OUT: no chromium and chromedriver here (on Debian: apt-get install chromium chromium-driver)\n' >&2
    set -- -m 'not gpu and not browser' "$@"
fi
# Files whole: their servers and models are made once (tests/order.py). Three processes keep two cores busy while tests wait
# for servers. A -n among the options comes later and wins.
exec .venv/bin/python -m pytest -n 3 --dist loadfile "$@"
