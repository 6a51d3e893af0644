"""docs/demands.md names every row of its three documents once, and only tests and modules that exist."""

from __future__ import annotations

import re

from eval.servers import ROOT

TEXT = (ROOT / "docs" / "demands.md").read_text()


def test_every_row_is_there_once() -> None:
    rows = re.findall(r"^\| ([ABC]\d+) \|", TEXT, re.MULTILINE)
    wanted = [*(f"A{n}" for n in range(26, 39)), *(f"B{n}" for n in range(1, 30)), *(f"C{n}" for n in range(1, 11))]
    assert rows == wanted


def test_every_command_of_the_documents_writes_json() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    commands = {name for page in pages for name in re.findall(r"python -m eval\.(\w+)", page.read_text())}
    assert len(commands) > 20
    for name in commands:
        source = (ROOT / "eval" / f"{name}.py").read_text()
        shared = ("add_hardware_arguments(", "add_lab_arguments(")
        assert '"--json"' in source or any(call in source for call in shared), name


def test_what_it_names_exists() -> None:
    for name in set(re.findall(r"`(test_\w+)`", TEXT)):
        assert (ROOT / "tests" / "eval" / f"{name}.py").is_file(), name
    for name in set(re.findall(r"`(tests/[\w/.]+)`", TEXT)):
        assert (ROOT / name).exists(), name
    for name in set(re.findall(r"`eval\.(\w+)", TEXT)):
        assert (ROOT / "eval" / f"{name}.py").is_file(), name
    for module, options in re.findall(r"`eval\.(\w+)((?: [^`]*)?)`", TEXT):
        source = (ROOT / "eval" / f"{module}.py").read_text()
        source += "".join(
            (ROOT / "eval" / f"{name}.py").read_text() for name in ("hardware_options", "server_options", "scenarios")
        )
        for option in re.findall(r"--[a-z-]+", options):
            assert f'"{option}"' in source, (module, option)
