"""What source code may import and call, as rules, and the faults of a source under them: read, never run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED_MODULES = frozenset({"pickle", "marshal", "shelve", "dbm"})


@dataclass(frozen=True)
class Rules:
    """``modules``: all that may be imported beside the standard library, None for anything not banned.

    ``optional``: those that may be missing. ``needs``: calls that must carry a constant argument. ``forbidden``:
    arguments that must not be that constant; ``only_false``: those that must be False. ``keys``: what nobody looks up.
    """

    banned_modules: frozenset[str]
    banned_calls: frozenset[str]
    modules: frozenset[str] | None = None
    optional: frozenset[str] = frozenset()
    needs: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    forbidden: Mapping[str, bool] = field(default_factory=dict)
    only_false: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()


def faults(source: str, rules: Rules) -> Iterator[str]:
    """``line N: what`` for everything in ``source`` that the rules do not allow."""
    tree = ast.parse(source)
    guarded = guarded_lines(tree)
    for node in ast.walk(tree):
        where = getattr(node, "lineno", 0)
        for name in imported(node):
            if not _may_import(name, rules):
                yield f"line {where}: imports {name}"
            if name in rules.optional and where not in guarded:
                yield f"line {where}: needs {name} at import time"
        if isinstance(node, ast.Call):
            for fault in _faults_of_call(node, rules):
                yield f"line {where}: {fault}"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in rules.keys:
            yield f"line {where}: reads {node.slice.value}"


def faults_below(folder: str, rules: Rules) -> list[str]:
    """``path: line N: what`` of every file of one of the project's folders, which must have some."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return [f"{path.relative_to(ROOT)}: {fault}" for path in files for fault in faults(path.read_text("utf-8"), rules)]


def _may_import(name: str, rules: Rules) -> bool:
    if name in rules.banned_modules:
        return False
    return rules.modules is None or name in sys.stdlib_module_names or name in rules.modules | rules.optional


def _faults_of_call(node: ast.Call, rules: Rules) -> Iterator[str]:
    name = dotted(node.func)
    values = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in rules.banned_calls:
        yield f"calls {name}"
    if name in rules.needs:
        argument, wanted = rules.needs[name]
        if not _is(values.get(argument), wanted):
            yield f"{name} without {argument}={wanted}"
    for argument, bad in rules.forbidden.items():
        if _is(values.get(argument), bad):
            yield f"{argument}={bad}"
    for argument in sorted(rules.only_false & {str(name) for name in values}):
        if not _is(values[argument], False):
            yield argument


def _is(value: ast.expr | None, constant: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def guarded_lines(tree: ast.AST) -> set[int]:
    """Lines that do not run when a module is imported, or that run in a ``try``: where a package may be missing."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (isinstance(node, ast.Try) and node.handlers):
            for statement in node.body:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [str(node.module).split(".")[0]]
    return []
