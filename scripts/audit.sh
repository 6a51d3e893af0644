#!/bin/sh
# Checks the code and the pinned packages, and writes the bill of materials: sh scripts/audit.sh [SBOM.json]
#
# The tools get an environment of their own. pip-audit asks PyPI for known vulnerabilities; where that service cannot be
# reached, or does not know a package, this fails and says so: nothing unchecked counts as clean.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
sbom=${1:-.venv/audit/sbom.json}
tools=$root/.venv/audit

[ -x "$tools/bin/bandit" ] || python3 -m venv "$tools"
"$tools/bin/python" -m pip install -qq --disable-pip-version-check -r requirements/audit.txt

printf '== bill of materials of all pinned packages: %s\n' "$sbom"
cat requirements/serve.txt requirements/constraints.txt | grep -v '^-c ' >"$tools/pins.txt"
"$tools/bin/cyclonedx-py" requirements --pyproject pyproject.toml --output-file "$sbom" "$tools/pins.txt"
printf '== bandit\n'
"$tools/bin/bandit" -q -c pyproject.toml -r serve verify eval drafter_train scripts
printf '== pip-audit\n'
"$tools/bin/pip-audit" --strict --no-deps --disable-pip -r "$tools/pins.txt"
printf '== clean\n'
