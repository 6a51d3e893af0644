"""Small submission tarballs for tests: a right one, and members to spoil it with."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

START = "#!/bin/sh\nset -eu\nexec python3 -m server\n"
GOOD: dict[str, str | bytes] = {
    "start_server.sh": START,
    "setup.sh": "#!/bin/sh\nexit 0\n",
    "server/__main__.py": "import os\nprint(os.environ['PORT'])\n",
}


def write(path: Path, files: dict[str, str | bytes], *members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    """A tarball of ``files`` and of ``members`` without content."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for member in members:
            tar.addfile(member)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry
