"""What a grader's archive check would stumble over: a submission tarball is read member by member, nothing is unpacked.

Each fault has a name (nested root, bashism, wheel inside ...), the member it is about and what to do. Standard library
only, so that the archive can be built and checked where nothing is installed. It starts nothing and knows no hub.
"""

from __future__ import annotations

import gzip
import json
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.rehearse_python import python_faults
from eval.rehearse_shell import bashisms, downloads, syntax_error

START = "start_server.sh"
ENTRY_SCRIPTS = (START, "setup.sh")
FILE_LIMIT = 512 * 1024
TOTAL_LIMIT = 8 * 1024 * 1024
"""Bytes, unpacked: a source tree is far below, weights and wheels are far above."""

_SUFFIXES = {
    "wheel inside": (".whl", ".egg"),
    "weights inside": (
        *(".safetensors", ".gguf", ".ggml", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack"),
        *(".npy", ".npz", ".engine", ".plan", ".awq", ".gptq"),
    ),
    "pickle inside": (".pkl", ".pickle", ".joblib", ".dill"),
    "archive inside": (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z"),
    "binary inside": (".so", ".o", ".a", ".dll", ".dylib", ".exe", ".cubin", ".fatbin", ".pyd", ".jar"),
    "cache inside": (".pyc", ".pyo"),
}
_CACHE_PARTS = ("__pycache__", ".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__MACOSX", ".DS_Store")
_MAGIC: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("weights inside", re.compile(rb"GGUF|GGML|\x93NUMPY|\x89HDF|.{8}\{\s*\"", re.DOTALL)),
    ("pickle inside", re.compile(rb"\x80[\x02-\x05]")),
    ("archive inside", re.compile(rb"PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd")),
    ("binary inside", re.compile(rb"\x7fELF|MZ|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe|!<arch>")),
)


@dataclass(frozen=True)
class Fault:
    """One thing wrong. ``kind`` is the fault's name, ``where`` the member (with a line where there is one)."""

    kind: str
    where: str
    message: str

    def line(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}" if self.where else f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Manifest:
    """The drafter that a submission declares."""

    repo: str
    revision: str


@dataclass(frozen=True)
class Archive:
    """What is in a tarball. ``files``: name -> bytes, unpacked; ``manifest``: a pinned drafter, if one is declared."""

    faults: tuple[Fault, ...]
    files: dict[str, int]
    manifest: Manifest | None = None


def check_archive(path: Path) -> Archive:
    """Reads the whole tarball. Raises OSError when the file itself cannot be read."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return Archive((Fault("not gzip", "", f"{path.name} must be a gzip-compressed tar"),), {})
    faults: list[Fault] = []
    contents: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                name = posixpath.normpath(member.name)
                faults += _member_faults(member, name, name in sizes)
                if not member.isreg():
                    continue
                sizes[name] = member.size
                if sum(sizes.values()) > TOTAL_LIMIT:
                    faults.append(Fault("too large", name, f"with it the source passes {TOTAL_LIMIT} bytes"))
                    break
                stream = tar.extractfile(member)
                contents[name] = stream.read() if stream else b""
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        faults.append(Fault("broken archive", "", str(error)))
    faults += _root_faults(contents)
    for name, data in sorted(contents.items()):
        faults += _file_faults(name, data)
    manifest = None
    if "manifest.json" in contents:
        manifest, found = read_manifest(contents["manifest.json"])
        faults += found
    return Archive(tuple(faults), sizes, manifest)


def read_manifest(data: bytes) -> tuple[Manifest | None, list[Fault]]:
    """The pinned drafter of a manifest.json, or the faults that make it none."""

    def fault(message: str) -> tuple[None, list[Fault]]:
        return None, [Fault("unpinned manifest", "manifest.json", message)]

    try:
        entry = json.loads(data)
    except ValueError as error:
        return fault(f"not JSON: {error}")
    if not isinstance(entry, dict) or set(entry) != {"drafter_hf_repo", "revision"}:
        return fault('must be {"drafter_hf_repo": ..., "revision": ...} and nothing else')
    repo, revision = entry["drafter_hf_repo"], entry["revision"]
    if not isinstance(repo, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        return fault(f"drafter_hf_repo must be OWNER/NAME, got {repo!r}")
    if not isinstance(revision, str) or not re.fullmatch(r"[0-9a-f]{40}", revision):
        return fault(f"revision must be a commit of 40 hex digits, not a branch or tag, got {revision!r}")
    return Manifest(repo, revision), []


def _member_faults(member: tarfile.TarInfo, name: str, seen: bool) -> Iterator[Fault]:
    if member.name.startswith("/"):
        yield Fault("absolute path", member.name, "members must be relative to the archive's root")
    elif name.startswith(".."):
        yield Fault("path outside", member.name, "members must stay below the archive's root")
    if member.issym() or member.islnk():
        # A symbolic link is relative to its own folder, a hard link to the root.
        base = posixpath.dirname(name) if member.issym() else ""
        target = posixpath.normpath(posixpath.join(base, member.linkname))
        if target.startswith(("..", "/")):
            yield Fault("symlink outside", name, f"points to {member.linkname}, which is not in the archive")
    elif not (member.isreg() or member.isdir()):
        yield Fault("special file", name, "only files, folders and links inside the archive are source")
    if seen:
        yield Fault("double member", name, "is in the archive twice; which one counts depends on who unpacks")


def _root_faults(contents: dict[str, bytes]) -> Iterator[Fault]:
    if START in contents:
        return
    nested = sorted((name for name in contents if posixpath.basename(name) == START), key=len)
    if nested:
        folder = posixpath.dirname(nested[0])
        advice = f"pack from inside the folder (tar -C {folder} .)"
        yield Fault("nested root", nested[0], f"{START} must be at the archive's root; {advice}")
    else:
        yield Fault("missing run", START, "nothing at the archive's root starts a server")


def _file_faults(name: str, data: bytes) -> Iterator[Fault]:
    kind = _foreign_kind(name, data)
    if kind is not None:
        yield Fault(kind, name, "a submission is source only")
        return
    if len(data) > FILE_LIMIT:
        yield Fault("too large", name, f"{len(data)} bytes, over {FILE_LIMIT}: not source")
    text = data.decode("utf-8")
    if name.endswith(".sh") or text.startswith("#!/bin/sh"):
        yield from _script_faults(name, text)
    elif name.endswith(".py"):
        for line, fault, message in python_faults(text):
            yield Fault(fault, f"{name} line {line}", message)


def _foreign_kind(name: str, data: bytes) -> str | None:
    """The name of what is not source, by file name and by first bytes (a renamed file keeps those)."""
    if any(part in _CACHE_PARTS or part.startswith("._") for part in name.split("/")):
        return "cache inside"
    for kind, suffixes in _SUFFIXES.items():
        if name.lower().endswith(suffixes):
            return kind
    try:
        if b"\0" not in data:
            data.decode("utf-8")
            return None
    except UnicodeDecodeError:
        pass
    return next((kind for kind, magic in _MAGIC if magic.match(data)), "binary inside")


def _script_faults(name: str, text: str) -> Iterator[Fault]:
    if "\r" in text:
        line = text[: text.index("\r")].count("\n") + 1
        yield Fault("CRLF", f"{name} line {line}", "carriage return at the end of a line; sh takes it for a character")
        return
    for line, what in bashisms(text):
        yield Fault("bashism", f"{name} line {line}", f"{what} is not known to sh (dash)")
    error = syntax_error(text)
    if error is not None:
        yield Fault("bashism", name, f"sh -n: {error}")
    if name in ENTRY_SCRIPTS:
        for line in downloads(text):
            yield Fault("download", f"{name} line {line}", "there is no network and no package index in a graded run")
