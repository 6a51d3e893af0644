from __future__ import annotations

from pathlib import Path

import pytest

from eval.rehearse_shell import bashisms, downloads, read_script, syntax_error
from eval.servers import ROOT

SCRIPTS = [*sorted(ROOT.glob("*.sh")), *sorted((ROOT / "scripts").rglob("*.sh"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_our_own_scripts_run_under_dash(path: Path) -> None:
    text = path.read_text()
    if text.startswith("#!/bin/sh"):
        assert bashisms(text) == []
        assert syntax_error(text) is None


@pytest.mark.parametrize(
    "line",
    [
        'if [[ "$a" ]]; then :; fi',
        "source env.sh",
        "then source env.sh",
        "function run() { :; }",
        "files=(a b)",
        "files+=(c)",
        "name+=x",
        "cat <<<word",
        "diff <(a) b",
        "run &>log",
        "run >& log",
        "a |& b",
        "((i++))",
        'if [ "$a" == b ]; then :; fi',
        "set -euo pipefail",
        "echo -e 'a\\n'",
        "for i in {1..3}; do :; done",
        "x=$'a'",
        "read -a parts",
        "read -r -t 5 answer",
        "printf -v name x",
        "trap 'x' ERR",
        "declare -A map",
        'echo "${!name}"',
        'echo "${name//a/b}"',
        'echo "${name^^}"',
        'echo "${name:1:2}"',
        'echo "${names[0]}"',
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        'echo "$(if [[ -n $a ]]; then echo b; fi)"',
        "sleep $RANDOM",
    ],
)
def test_bash_only_syntax_is_found_on_its_line(line: str) -> None:
    assert {number for number, _ in bashisms(f"#!/bin/sh\nset -eu\n{line}\n")} == {3}


@pytest.mark.parametrize(
    "line",
    [
        "# [[ a == b ]] and source x, $RANDOM",
        "echo '[[ $RANDOM ${a[0]} ]]'",
        'echo "[[ and (( and <<< and source x"',
        "echo $((1 + 2)) $(($a << 2))",
        'run >"$log" 2>&1 <&3 >&2',
        "x=${a:-b} y=${b:=c} z=${c:+d} w=${d:?no} v=${e##*/} u=${f%.*} t=${#g}",
        'if [ "$a" = b ] && ! test -n "$c"; then :; fi',
        'x=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)',
        "case $x in\n    a | b) : ;;\n    *) : ;;\nesac",
        "cat <<EOF\n[[ here ]] source x ${a[0]\nEOF",
        "cat <<-'END'\n\t[[ there ]]\n\tEND",
        "set -- -r a && read -r line",
        "echo it\\'s [ fine ]",
        'run || echo "a == b"',
    ],
)
def test_posix_syntax_and_words_in_strings_are_left_alone(line: str) -> None:
    assert bashisms(f"#!/bin/sh\n{line}\n") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pip install x", True),
        ("if true; then curl -O http://x; fi", True),
        ("a && python3 -m pip install x", True),
        ("git clone http://x", True),
        ("sudo apt-get install y", True),
        ("has python pip", False),
        ("echo 'pip install x'", False),
        ("# wget x", False),
        ("git status", False),
    ],
)
def test_downloads_are_found_where_commands_stand(line: str, found: bool) -> None:
    assert downloads(f"#!/bin/sh\n{line}\n") == ([2] if found else [])


def test_blanking_keeps_every_line_where_it_was() -> None:
    text = "a 'b\nc' \"d\ne\" # f\ncat <<X\ng\nX\nh\n"
    script = read_script(text)
    assert script.commands.count("\n") == script.expansions.count("\n") == text.count("\n")
    assert script.commands.splitlines()[-1] == "h"


def test_what_dash_cannot_parse_is_said_in_its_words() -> None:
    assert "Syntax error" in str(syntax_error("if true; then\n"))
    assert syntax_error("if true; then :; fi\n") is None
