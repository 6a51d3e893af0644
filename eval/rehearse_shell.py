"""What is wrong with a shell script that will be run by dash: bash-only syntax, downloads, what does not parse.

The text is read the way a shell reads it (comments, quotes, here-documents), so that words inside strings are not
mistaken for commands. It runs nothing but ``sh -n``. Standard library only; it knows no archives.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_AT = r"(?:^|[;&|(]|\b(?:if|then|else|elif|do|while|until|exec)\s|!\s)[ \t]*"
# Looked for where commands stand; quoted text is blanked there.
_COMMANDS: tuple[tuple[str, str], ...] = (
    (r"\[\[", "[[ ... ]]"),
    (_AT + r"(?:source|declare|typeset|let|pushd|popd|shopt|mapfile|readarray|select)[ \t]", "a bash builtin"),
    (_AT + r"function[ \t]+\w", "function NAME"),
    (r"(?:^|[ \t;&|])\w+\+?=\(", "an array"),
    (r"(?:^|[ \t;&|])\w+\+=", "+="),
    (r"<<<", "<<<"),
    (r"[<>]\(", "process substitution"),
    (r"&>", "&>"),
    (r">&[ \t]*[^\d\s\-&]", ">& FILE"),
    (r"\|&", "|&"),
    (r"(?<!\$)\(\(", "(( ... ))"),
    (r"(?:^|\s)(?:\[|test)[ \t][^\n;|&]*[ \t]==[ \t]", "== in a test"),
    (r"\bset[ \t]+-[a-z]*o[ \t]+pipefail", "pipefail"),
    (_AT + r"echo[ \t]+-[nE]*e", "echo -e"),
    (r"\{\w+\.\.\w+\}", "{a..b}"),
    (r"\$'", "$'...'"),
    (_AT + r"read[ \t]+(?:-[rp]+[ \t]+)*-[a-z]*[adeinNstu]", "an option of read"),
    (_AT + r"printf[ \t]+-v", "printf -v"),
    (_AT + r"export[ \t]+-f", "export -f"),
    (_AT + r"wait[ \t]+-n", "wait -n"),
    (_AT + r"trap[ \t][^\n]*\b(?:ERR|DEBUG|RETURN)\b", "trap ERR"),
)
# Looked for where parameters expand: inside double quotes too.
_EXPANSIONS: tuple[tuple[str, str], ...] = (
    (r"\$\{!", "${!name}"),
    (r"\$\{\w+[/^,@]", "${name/...}"),
    (r"\$\{\w+:(?![-=?+])", "${name:offset}"),
    (r"\$\{#?\w+\[", "${name[...]}"),
    (r"\$\{?(?:RANDOM|BASH\w*|FUNCNAME|PIPESTATUS|SECONDS|EUID|UID)\b", "a bash variable"),
)
_DOWNLOADS = (
    _AT + r"(?:sudo[ \t]+)?(?:pip3?|curl|wget|git[ \t]+clone|apt|apt-get|conda|uv|hf|huggingface-cli)[ \t]",
    r"-m[ \t]+pip[ \t]+(?:install|download)\b",
)


@dataclass(frozen=True)
class Script:
    """A script with what a shell would not run blanked out, newlines kept. ``commands``: quoted text blanked as well;
    ``expansions``: double-quoted text kept."""

    commands: str
    expansions: str


def read_script(text: str) -> Script:
    """Blanks comments, single-quoted text and here-documents; double-quoted text only in ``commands``."""
    commands, expansions = list(text), list(text)
    stack: list[list[int]] = [[0]]  # open $( levels inside double quotes; each holds its count of open parentheses
    quoted = False
    ends: list[str] = []
    at, size = 0, len(text)

    def blank(start: int, stop: int, *masks: list[str]) -> None:
        for mask in masks:
            mask[start:stop] = ["\n" if character == "\n" else "_" for character in text[start:stop]]

    while at < size:
        character, pair = text[at], text[at : at + 2]
        if character == "\\":
            blank(at, at + 2, commands)
            at += 2
        elif quoted:
            if character == '"':
                quoted = False
            elif pair == "$(":
                stack.append([0])
                quoted = False
                at += 1
            else:
                blank(at, at + 1, commands)
            at += 1
        elif character == '"':
            quoted = True
            at += 1
        elif character == "'":
            stop = text.find("'", at + 1)
            stop = size if stop < 0 else stop
            blank(at + 1, stop, commands, expansions)
            at = stop + 1
        elif character == "#" and (at == 0 or text[at - 1] in " \t\n;&|("):
            stop = text.find("\n", at)
            stop = size if stop < 0 else stop
            blank(at, stop, commands, expansions)
            at = stop
        elif (here := re.match(r"<<-?[ \t]*(['\"\\]?)(\w+)", text[at:])) and text[at - 1 : at] != "<":
            ends.append(here[2])
            at += here.end()
        elif character == "\n" and ends:
            for end in ends:
                found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, at + 1)
                stop = size if found is None else found.end()
                blank(at, stop, commands, expansions)
                at = stop
            ends = []
        else:
            if character == "(":
                stack[-1][0] += 1
            elif character == ")" and len(stack) > 1 and stack[-1][0] == 0:
                stack.pop()
                quoted = True
            elif character == ")":
                stack[-1][0] -= 1
            at += 1
    return Script("".join(commands), "".join(expansions))


def bashisms(text: str) -> list[tuple[int, str]]:
    """(line, what) of syntax that dash does not have."""
    script = read_script(text)
    return [*_matches(script.commands, _COMMANDS), *_matches(script.expansions, _EXPANSIONS)]


def downloads(text: str) -> list[int]:
    """Lines that fetch something: a graded start has no network."""
    return [line for line, _ in _matches(read_script(text).commands, tuple((rule, "") for rule in _DOWNLOADS))]


def _matches(mask: str, rules: tuple[tuple[str, str], ...]) -> Iterator[tuple[int, str]]:
    for pattern, what in rules:
        for found in re.finditer(pattern, mask, re.MULTILINE):
            start = found.start() + (1 if found[0].startswith("\n") else 0)
            yield mask.count("\n", 0, start) + 1, what


def syntax_error(text: str) -> str | None:
    """What ``sh -n`` (dash where there is one) says, or None. None too where there is no shell to ask."""
    shell = shutil.which("dash") or shutil.which("sh")
    if shell is None:
        return None
    done = subprocess.run([shell, "-n"], input=text.encode(), capture_output=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else f"sh -n ended with {done.returncode}"
