"""Faults inside a running server: its drafter, its memory, its disk, its clients. Each returns what was seen.

A fault is a function of a Lab that raises BrokenPromise or TimeoutError where the promise was not kept. It does not
know how the table is made.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from eval.chaos_client import Lab, Stream, answer, check, ends, health, metrics, question, streams, wait_for
from eval.servers import ServerFailed

FAULTS_UNTIL_OFF = 3
TOKENS = 48
DRAFTED = 4
FULL_DISK_KIB = 64
MOST_TRACED = 40
MEMORY_ROOM = 8 << 20
"""With what the engine holds from its start, less than the logits of a full step of the large request take."""


def drafter_fault(name: str, counted: bool) -> Callable[[Lab], str]:
    """A drafter with the built-in fault ``name``; ``counted``: it shows in the metrics, else it only guesses badly."""

    def fault(lab: Lab) -> str:
        with lab.server("--proposer", "none") as plain:
            expected = answer(plain.url, TOKENS)
        # A fixed length: on a crowded machine the controller may find that drafts do not pay, and none would fail.
        with lab.server("--proposer", "block", "--block-length", str(DRAFTED), fault=name) as server:
            check(answer(server.url, TOKENS) == expected, "another text than without a drafter")
            page = metrics(server.url)
            faults = page["foretoken:drafter_faults_total"]
            kept = page["vllm:spec_decode_num_accepted_tokens_total"]
            check(faults == (FAULTS_UNTIL_OFF if counted else 0), faults)
            check(health(server.url) == 200, "/health is not 200")
            return f"same text as without a drafter; {faults:.0f} faults counted, {kept:.0f} drafted tokens kept"

    fault.__doc__ = f"The drafter of a running server fails: {name}."
    return fault


def drafter_folder_of_nan(lab: Lab) -> str:
    """A drafter folder whose weights are NaN."""
    with lab.server("--proposer", "none") as plain:
        expected = answer(plain.url, TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        spoilt = Path(folder) / "drafter"
        shutil.copytree(lab.drafter_dir, spoilt)
        for file in spoilt.glob("*.safetensors"):
            save_file({key: torch.full_like(value, float("nan")) for key, value in load_file(file).items()}, file)
        try:
            with lab.server("--drafter-dir", str(spoilt)) as server:
                check(answer(server.url, TOKENS) == expected, "another text than without a drafter")
                faults = metrics(server.url)["foretoken:drafter_faults_total"]
                check(faults > 0, "no fault counted")
                return f"same text as without a drafter; {faults:.0f} faults counted"
        except ServerFailed as failure:
            reason = str(failure).strip().splitlines()[-1]
            check("cannot start" in reason and "drafter" in reason, reason)
            with lab.server("--drafter-dir", "", environ={"DRAFTER_BYO_DIR": str(spoilt)}) as server:
                check(answer(server.url, TOKENS) == expected, "another text than without a drafter")
                return f'refused at start: "{reason}"; from the environment: served without it, same text'


def out_of_memory(lab: Lab) -> str:
    """No memory for the pass of one large request (RLIMIT_AS of the engine)."""
    with lab.server() as server:
        expected = answer(server.url, TOKENS)
        engine = server.child_pid()
        large = {"prompt": "word " * 700, "max_tokens": 2, "echo": True, "logprobs": 20, "temperature": 0}
        running = streams(server.url, 1, TOKENS, lab.seconds)
        resource.prlimit(engine, resource.RLIMIT_AS, (_virtual_bytes(engine) + MEMORY_ROOM, resource.RLIM_INFINITY))
        with ThreadPoolExecutor(2) as pool:
            statuses = list(pool.map(lambda _: completion_status(server.url, large), range(2)))
        others = ends(running, lab.seconds)
        resource.prlimit(engine, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        check(statuses == [500, 500], statuses)
        check(others == "1 done", others)
        check(server.child_pid() == engine, "the engine was lost")
        check(answer(server.url, TOKENS) == expected, "another text afterwards")
        return f"large requests: HTTP {statuses}; a stream beside them: {others}; afterwards the same text as before"


def completion_status(url: str, body: dict[str, Any]) -> int:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False).status_code


def client_leaves(lab: Lab) -> str:
    """Clients hang up in the middle of their streams while another one reads on."""
    with lab.server() as server:
        reader = Stream(server.url, question(400))
        leaving = streams(server.url, 4, 1000, lab.seconds)
        wait_for(lambda: metrics(server.url)["vllm:num_requests_running"] == 5, 5, "the statistics show five requests")
        steps = metrics(server.url)["foretoken:steps_total"]
        for stream in leaving:
            stream.leave()

        def left() -> bool:
            return metrics(server.url)["vllm:num_requests_running"] <= 1

        took = wait_for(left, lab.seconds, "their requests are gone")
        steps = metrics(server.url)["foretoken:steps_total"] - steps
        check(not reader.end, f"the reader ended too early to tell: {reader.end}")
        how = ends([reader], lab.seconds)
        check(how == "1 done", how)
        wait_for(lambda: _all_free(server.url), 5, "every page is free")
        return f"requests and pages gone {took:.2f} s later (within {steps:.0f} steps, statistics are sent every 0.1 s)"


def _all_free(url: str) -> bool:
    page = metrics(url)
    return page["foretoken:kv_pages_free"] == page["foretoken:kv_pages"]


def trace_disk_full(lab: Lab) -> str:
    """The disk of the trace folder fills up."""
    with small_disk(f"size={FULL_DISK_KIB}k") as folder:
        if folder is not None:
            (folder / "filler").write_bytes(b"x" * (FULL_DISK_KIB - 4) * 1024)
            return _traced(lab, folder, limit_files=False)
    with tempfile.TemporaryDirectory() as plain:
        return _traced(lab, Path(plain), limit_files=True)


def trace_folder_read_only(lab: Lab) -> str:
    """The trace folder cannot be written."""
    with small_disk("ro,size=64k") as folder:
        if folder is not None:
            return _traced(lab, folder, limit_files=False)
    with tempfile.TemporaryDirectory() as plain:
        sealed = Path(plain) / "sealed"
        sealed.mkdir(mode=0o500)
        return _traced(lab, sealed, limit_files=False)


def _traced(lab: Lab, folder: Path, limit_files: bool) -> str:
    with lab.server("--trace-dir", str(folder)) as server:
        if limit_files:
            resource.prlimit(server.child_pid(), resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        texts = [answer(server.url, 8)]

        def warnings() -> list[str]:
            return [line for line in server.log_tail(1 << 20).splitlines() if "trace switched off" in line]

        while not warnings() and len(texts) < MOST_TRACED:
            texts.append(answer(server.url, 8))
        texts += [answer(server.url, 8) for _ in range(2)]
        check(len(set(texts)) == 1, "the text changed")
        check(health(server.url) == 200, "/health is not 200")
        check(len(warnings()) == 1, f"{len(warnings())} warnings after {len(texts)} answers")
        said = warnings()[0].split(": ", 1)[1][:110]
        return f'{len(texts)} answers of the same text, one warning: "{said}"'


def log_disk_full(lab: Lab) -> str:
    """Standard output and error lie on a full disk."""
    with lab.server() as reference:
        expected = answer(reference.url)
    with open("/dev/full", "wb") as full, lab.server("--log-json", output=full) as server:
        check(answer(server.url) == expected, "another text than with a log")
        check(health(server.url) == 200, "/health is not 200")
        return "starts, answers the same text, /health 200"


@contextmanager
def small_disk(options: str) -> Iterator[Path | None]:
    """A tmpfs mounted with ``options``; None where this user may not mount."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield Path(folder) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", folder], check=True)


def _virtual_bytes(pid: int) -> int:
    with contextlib.suppress(StopIteration):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize:"))
    raise RuntimeError(f"process {pid} has no VmSize")
