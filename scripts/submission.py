"""The tarball of a graded run: which files belong in it, packed to the same bytes every time, then checked.

``sh scripts/make_submission.sh OUT.tar.gz`` runs this. Only what serves is packed: the server, the verifier, the start
scripts and what those need on a bare machine. It knows no server and starts nothing.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.rehearse_archive import check_archive, read_manifest

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = (
    "start_server.sh",
    "setup.sh",
    "LICENSE",
    "serve",
    "verify",
    "requirements",
    "scripts/setup_venv.sh",
    "scripts/fetch_default_model.py",
    "scripts/convert_gguf.py",
)
MANIFEST = "manifest.json"
# 1980-01-01: the oldest time that every tool takes without a remark.
MTIME = 315_532_800
_SKIPPED = ("__pycache__", ".pyc")


class SubmissionError(Exception):
    """Nothing was built; the message says what to do."""


@dataclass(frozen=True)
class Listing:
    """``names``: files to pack, sorted; ``notes``: what a person should know about the list."""

    names: tuple[str, ...]
    notes: tuple[str, ...]


def list_files(root: Path) -> Listing:
    """The files of ``CONTENTS``: those git tracks, or, in a copy without git, those that are there."""
    tracked = _git(root, "ls-files", "-z", "--", *CONTENTS)
    if tracked is None:
        found = [
            path.relative_to(root).as_posix()
            for entry in CONTENTS
            for path in ([root / entry] if (root / entry).is_file() else sorted((root / entry).rglob("*")))
            if path.is_file() and not any(word in path.as_posix() for word in _SKIPPED)
        ]
        return Listing(tuple(sorted(found)), ("no git here: every file of the folders is packed",))
    notes = []
    names = sorted(tracked)
    for name in _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *CONTENTS) or []:
        notes.append(f"not tracked by git, left out: {name}")
    if changed := _git(root, "diff", "--name-only", "-z", "HEAD", "--", *CONTENTS):
        notes.append(f"packed as they are now, not as committed: {', '.join(sorted(changed))}")
    return Listing(tuple(names), tuple(notes))


def _git(root: Path, *command: str) -> list[str] | None:
    """The NUL-separated answer of git, or None where ``root`` is not the top of a repository."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in done.stdout.split("\0") if name]


def pack(root: Path, names: Sequence[str], manifest: Path | None = None) -> bytes:
    """A gzip-compressed tar: sorted names, one owner, one time, modes by suffix. The same files give the same bytes.
    ``manifest`` is the file to pack under that name where it is not ``root``'s."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(names):
            path = manifest if manifest is not None and name == MANIFEST else root / name
            if path.is_symlink() or not path.is_file():
                raise SubmissionError(f"{name} is not a plain file")
            data = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), MTIME
            entry.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(entry, io.BytesIO(data))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as file:
        file.write(plain.getvalue())
    return packed.getvalue()


def build(root: Path, out: Path, with_manifest: bool, manifest: Path | None = None) -> tuple[bytes, Listing]:
    """Pack, check and write ``out``. Raises SubmissionError (``out`` is then not touched) or OSError."""
    listing = list_files(root)
    names = list(listing.names)
    pinned = manifest or root / MANIFEST
    if with_manifest and (manifest is not None or pinned.is_file()):
        _, faults = read_manifest(pinned.read_bytes())
        if faults:
            raise SubmissionError(f"{faults[0].line()}; pin it (drafter_train.publish) or build with --no-drafter")
        names.append(MANIFEST)
    data = pack(root, names, manifest)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        faults = list(check_archive(unfinished).faults)
        if faults:
            lines = "\n  ".join(fault.line() for fault in faults)
            raise SubmissionError(f"the archive would not pass a grader:\n  {lines}")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return data, listing


def drafter_lines(out: Path, drafter: Path | None) -> list[str]:
    """What the grader will record of the drafter. Raises SubmissionError when it breaks a rule."""
    manifest = check_archive(out).manifest
    if manifest is None:
        return ["drafter: none declared (no manifest.json); DRAFTER_BYO_DIR will not be set"]
    from drafter_train.hub import HubError
    from eval.rehearse_drafter import hub_drafter, local_drafter

    lines = [f"drafter: {manifest.repo} at {manifest.revision}"]
    try:
        facts = local_drafter(drafter) if drafter is not None else hub_drafter(manifest)
    except (HubError, OSError, ImportError) as error:
        return [*lines, f"  weights hash unknown ({error}); give --drafter DIR"]
    if faults := facts.faults():
        raise SubmissionError("\n".join(fault.line() for fault in faults))
    return [*lines, *facts.lines()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sh scripts/make_submission.sh", description=__doc__)
    parser.add_argument("out", type=Path, help="tarball to write, for example submission.tar.gz")
    parser.add_argument("--drafter", type=Path, help="folder of the pinned drafter, to print its hash without the hub")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--manifest", type=Path, help="pinned drafter (default: manifest.json of the project if there)")
    which.add_argument("--no-drafter", action="store_true", help="leave manifest.json out")
    args = parser.parse_args(argv)
    if not args.out.name.endswith((".tar.gz", ".tgz")):
        parser.error(f"OUT must end in .tar.gz or .tgz, got {args.out.name}")
    try:
        data, listing = build(ROOT, args.out, not args.no_drafter, args.manifest)
        about_drafter = drafter_lines(args.out, args.drafter)
    except (SubmissionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    archive = check_archive(args.out)
    for name, size in archive.files.items():
        print(f"{size:>9,}  {name}")
    for note in listing.notes:
        print(f"note: {note}")
    unpacked = sum(archive.files.values())
    print(f"{args.out}: {len(archive.files)} files, {unpacked:,} bytes unpacked, {len(data):,} packed")
    print(f"sha256 {hashlib.sha256(data).hexdigest()}")
    print("\n".join(about_drafter))
    print(f"now: python -m eval.rehearse {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
