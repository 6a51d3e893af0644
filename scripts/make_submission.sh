#!/bin/sh
# Builds the tarball of a graded run and checks it: sh scripts/make_submission.sh OUT.tar.gz [--drafter DIR] [--no-drafter]
#
# Any Python from 3.10 will do; nothing is installed.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
command -v "$python" >/dev/null 2>&1 || {
    printf 'error: python3 is not installed; Python 3.10 or newer is needed\n' >&2
    exit 1
}
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
PYTHONSAFEPATH=1
export PYTHONPATH PYTHONSAFEPATH
exec "$python" -m scripts.submission "$@"
