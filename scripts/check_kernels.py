#!/usr/bin/env python3
"""Compiles every Triton kernel variant ahead of time, with no GPU, and refuses code that would be slow or not launch.

    python scripts/check_kernels.py [--arch 75,80,90] [--only WORD] [--triton-python PATH] [--no-cache]

Prints kernel, card, registers a thread, spilled bytes, shared memory and tensor-core shapes. Fails (exit 1) on a
variant that does not compile, spills, needs more shared memory than a block may have, or has a dot without tensor
cores. Results are kept under runs/kernel_check/, keyed by the kernels' source and the Triton version, so an unchanged
tree takes a second. --triton-python runs the check with another interpreter, which needs nothing but its own Triton.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "serve" / "kernels" / "triton"
RESULTS = ROOT / "runs" / "kernel_check"
TURING_MMA = "m16n8k8"


@dataclass(frozen=True)
class Row:
    """One compiled variant; ``error`` is why there is none."""

    name: str
    arch: int
    dots: bool
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    mma: str = "-"
    error: str = ""

    def fault(self, shared_limit: int) -> str:
        """Why this variant may not ship, or nothing."""
        if self.error:
            return self.error
        if self.spilled:
            return f"spills {self.spilled} bytes a thread"
        if self.shared > shared_limit:
            return f"{self.shared} bytes of shared memory, limit {shared_limit}"
        if self.dots and (self.mma == "-" or (self.arch < 80 and TURING_MMA not in self.mma)):
            return "a dot without tensor cores"
        return ""


def compile_row(arch: int, name: str) -> Row:
    """Compiles the variant of that name (in a worker process)."""
    from serve.kernels.triton import turing
    from serve.kernels.triton.ahead import compile_variant
    from serve.kernels.triton.variants import all_variants

    turing.install()
    variant = next(variant for variant in all_variants(arch) if variant.name == name)
    try:
        built = compile_variant(variant, arch)
    except Exception as error:  # whatever the compiler raises is the finding
        lines = str(error).strip().splitlines() or [repr(error)]
        return Row(name, arch, variant.dots, error=f"{type(error).__name__}: {lines[-1][:200]}")
    return Row(name, arch, variant.dots, built.registers, built.spilled, built.shared, built.mma)


def compile_rows(wanted: list[tuple[int, str, bool]]) -> list[Row]:
    """All rows in order, two at a time on two cores. A compiler that aborts takes its worker with it: named, not
    fatal."""
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(max_workers=min(len(wanted), os.cpu_count() or 1)) as pool:
            futures = [(key, pool.submit(compile_row, key[0], key[1])) for key in wanted]
            rows = []
            for (arch, name, dots), future in futures:
                try:
                    rows.append(future.result())
                except BrokenProcessPool:
                    rows.append(Row(name, arch, dots, error="a compiler process died here or nearby"))
    return rows


def source_hash(triton_version: str) -> str:
    digest = hashlib.sha256(f"{triton_version} {sys.version_info[:2]}".encode())
    for path in (*sorted(SOURCES.rglob("*.py")), Path(__file__)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def check(archs: list[int], only: str, use_cache: bool) -> int:
    import triton

    from serve.kernels.triton.tiles import shared_limit
    from serve.kernels.triton.variants import all_variants

    wanted = [(arch, v.name, v.dots) for arch in archs for v in all_variants(arch) if only in v.name]
    if not wanted:
        print(f"no variant has {only!r} in its name", file=sys.stderr)
        return 2
    store = RESULTS / f"{source_hash(triton.__version__)}.json"
    known: dict[tuple[int, str], Row] = {}
    if use_cache and store.is_file():
        known = {(row["arch"], row["name"]): Row(**row) for row in json.loads(store.read_text("utf-8"))}
    fresh = compile_rows([key for key in wanted if key[:2] not in known])
    known |= {(row.arch, row.name): row for row in fresh if not row.error}
    if use_cache and fresh:
        RESULTS.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps([asdict(row) for row in known.values()]), "utf-8")
    rows = known | {(row.arch, row.name): row for row in fresh}
    print(f"triton {triton.__version__}: {len(wanted)} variants, {len(fresh)} compiled now")
    print(f"{'kernel':42} {'arch':>5} {'regs':>5} {'spill':>6} {'shared':>7}  mma")
    faults = 0
    for arch, name, _ in wanted:
        row = rows[arch, name]
        fault = row.fault(shared_limit(arch))
        faults += bool(fault)
        tail = f"  FAULT: {fault}" if fault else ""
        print(f"{name:42} {'sm_' + str(arch):>5} {row.registers:5} {row.spilled:6} {row.shared:7}  {row.mma}{tail}")
    print(f"check_kernels: {len(wanted) - faults} ok, {faults} faults")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="75,80,90", help="compute capabilities, comma-separated (default 75,80,90)")
    parser.add_argument("--only", default="", help="variants with this word in their name")
    parser.add_argument("--triton-python", help="another python, with another Triton, to run the check with")
    parser.add_argument("--no-cache", action="store_true", help="compile again whatever is known")
    options = parser.parse_args()
    if not all(part.isdigit() for part in options.arch.split(",")):
        parser.error(f"--arch must be numbers such as 75,80,90, got {options.arch!r}")
    # The interpreter and the override are for running kernels, not for this.
    for name in ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH"):
        os.environ.pop(name, None)
    if options.triton_python:
        flags = ["--arch", options.arch, "--only", options.only, *(["--no-cache"] if options.no_cache else [])]
        return subprocess.run([options.triton_python, __file__, *flags]).returncode
    sys.path.insert(0, str(ROOT))
    return check([int(part) for part in options.arch.split(",")], options.only, not options.no_cache)


if __name__ == "__main__":
    sys.exit(main())
