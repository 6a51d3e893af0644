"""Compiles layer.c with the host's own C compiler, once for its sources, compiler and processor, into the user's cache.

Anything amiss is a NativeUnavailable with the reason in words; the caller then serves without it. Knows no C.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("layer.c")
_HEADERS = tuple(SOURCE.with_name(name) for name in ("attention.h", "product.h", "step.h", "vectors.h"))
SWITCH = "FORETOKEN_NATIVE"
_COMPILERS = ("cc", "gcc", "clang")
# gnu11, so that a product and a sum may become one instruction; nothing that lets sums change their order.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")
_SECONDS = 60.0


class NativeUnavailable(Exception):
    """The native path cannot be had here; the text says why."""


@dataclass(frozen=True)
class Built:
    """library: the shared object; compiler: its name and version, as in ``gcc 12.2``."""

    library: Path
    compiler: str


def build(environ: Mapping[str, str] = os.environ) -> Built:
    """The compiled layer.c, from the cache where it is there. Environment: FORETOKEN_NATIVE=0 turns it off, PATH finds
    the compiler, XDG_CACHE_HOME moves the cache. Raises NativeUnavailable."""
    if environ.get(SWITCH, "1") == "0":
        raise NativeUnavailable(f"turned off by {SWITCH}=0")
    try:
        compiler = _find(environ)
        version = _run([compiler, "--version"], environ).splitlines()[0]
        key = hashlib.sha256()
        sources = [path.read_bytes() for path in (SOURCE, *_HEADERS)]
        for part in (*sources, compiler.encode(), version.encode(), *map(str.encode, _FLAGS), _processor()):
            key.update(len(part).to_bytes(8, "little") + part)
        library = _cache_folder(environ) / f"layer-{key.hexdigest()[:32]}.so"
        if not library.exists():
            _compile(compiler, library, environ)
        return Built(library, _short(version))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise NativeUnavailable(f"{type(error).__name__}: {error}") from error


def _find(environ: Mapping[str, str]) -> str:
    for name in _COMPILERS:
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        if found:
            return str(Path(found).resolve())
    raise NativeUnavailable("no C compiler on the PATH (looked for " + ", ".join(_COMPILERS) + ")")


def _run(command: list[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=dict(environ), check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NativeUnavailable(f"{Path(command[0]).name} failed: {lines[0] if lines else done.returncode}")
    return done.stdout


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.partition(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)]).encode()


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """A folder that only this user can write: what lies there is loaded as code."""
    base = environ.get("XDG_CACHE_HOME") or (os.path.join(environ["HOME"], ".cache") if environ.get("HOME") else None)
    choices = [Path(base) / "foretoken" / "native"] if base else []
    choices.append(Path(tempfile.gettempdir()) / f"foretoken-native-{os.getuid()}")
    reasons: list[str] = []
    for folder in choices:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            reasons.append(str(error))
            continue
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if own and os.access(folder, os.W_OK | os.X_OK):
            return folder
        reasons.append(f"{folder} is not a folder that only this user can write")
    raise NativeUnavailable("no cache folder: " + "; ".join(reasons))


def _compile(compiler: str, library: Path, environ: Mapping[str, str]) -> None:
    """Into a file of its own, then renamed: several servers may start at once."""
    handle, name = tempfile.mkstemp(suffix=".so", prefix="build-", dir=library.parent)
    os.close(handle)
    try:
        _run([compiler, *_FLAGS, "-o", name, str(SOURCE), "-lm"], environ)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _short(version: str) -> str:
    """``gcc 12.2`` from the first line of --version."""
    words = version.replace("(", " ").replace(")", " ").split()
    numbers = [word for word in words if word[:1].isdigit() and "." in word]
    name = "clang" if "clang" in version else "gcc" if "gcc" in version.lower() else words[0]
    return " ".join([name, *(".".join(number.split("-")[0].split(".")[:2]) for number in numbers[:1])])
