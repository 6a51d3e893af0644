"""The grading image's limits inside every Python process of a rehearsal: a ``sitecustomize.py`` on PYTHONPATH.

Packages outside the grading stack and what it depends on cannot be found, as if they were not installed. Connections to
anything but this machine are recorded, and refused where no network namespace does that. Settings are in ``guard.json``
beside the copy of this file that is imported; events go to the file named there. Run as a script it prints the allowed
top-level names as JSON. Standard library only; it knows no server.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

STACK = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "accelerate", "numpy", "fastapi", "uvicorn"),
    *("httpx", "pydantic", "ninja"),
)
JINJA = ("jinja2", "markupsafe")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_LOCAL = re.compile(r"127\.|::1$|localhost$|0\.0\.0\.0$|::$|$")


def allowed_names(without: tuple[str, ...]) -> list[str]:
    """Top-level names of the stack's distributions and of everything these require (extras left out)."""
    waiting, seen, names = list(STACK), set(without), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in found.files or ():
            first = file.parts[0]
            if file.suffix in (".py", ".so", ".pyd") and not first.startswith(("..", "__pycache__")):
                names.add(first.partition(".")[0])
        for requirement in found.requires or ():
            text, _, marker = requirement.partition(";")
            if "extra" not in marker:
                waiting.append(re.split(r"[\s<>=!~(\[]", text.strip(), maxsplit=1)[0])
    return sorted(names)


class Guard:
    """The rules of one process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._names = frozenset(settings["names"]) | sys.stdlib_module_names | {"sitecustomize", "usercustomize"}
        self._roots = tuple(settings["roots"])
        self._events = settings["events"]
        self._refuse = bool(settings["refuse_network"])
        self._hidden: set[str] = set()

    def tell(self, **event: Any) -> None:
        """One line in the events file. Also in a child that has little left to work with, so nothing is imported."""
        line = json.dumps({"pid": os.getpid(), **event}) + "\n"
        handle = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def admits(self, name: str, spec: ModuleSpec) -> bool:
        """Whether the image would have this top-level module."""
        if name in self._names:
            return True
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(place.startswith(self._roots) for place in places):
            return True
        if all(place.startswith(_STANDARD) and "-packages" not in place for place in places if place):
            return True  # standard, but named for this build of Python
        if name not in self._hidden:
            self._hidden.add(name)
            self.tell(event="hidden", name=name)
        return False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Sees every connection and look-up that Python code makes."""
        if event == "socket.connect":
            address = arguments[1]
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            address = (arguments[0],)
        else:
            return
        if not isinstance(address, tuple) or not address:
            return  # a Unix socket
        host = address[0].decode() if isinstance(address[0], bytes) else str(address[0] or "")
        if _LOCAL.match(host):
            return
        self.tell(event="network", to=":".join(str(part) for part in address[:2]))
        if self._refuse:
            raise PermissionError(f"no network in a graded run (asked for {host})")


def install() -> None:
    """Takes over module look-up and watches connections in this process."""
    settings = json.loads(Path(__file__).with_name("guard.json").read_text(encoding="utf-8"))
    guard = Guard(settings)

    class GuardedFinder(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is None or path is not None or guard.admits(fullname.partition(".")[0], spec):
                return spec
            return None

    sys.meta_path[:] = [GuardedFinder if finder is PathFinder else finder for finder in sys.meta_path]
    sys.addaudithook(guard.audit)
    guard.tell(event="loaded", argv=sys.argv[:3] or sys.orig_argv[:4])


if __name__ == "sitecustomize":
    install()
elif __name__ == "__main__":
    json.dump(allowed_names(tuple(sys.argv[1:])), sys.stdout)
