"""Starts a server process, waits until it is ready, watches its memory, and stops it with everything it started.

Linux. It knows command lines and processes, not what the server does. A server never outlives its ``with`` block.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

import httpx

ROOT = Path(__file__).resolve().parent.parent
_PORTS = range(20_000, 32_000)


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message carries the end of its log."""


def free_port() -> int:
    """A port of the loopback address that nobody listens on: one of those that systems do not give to connections that
    name none, as those come and go. Raises OSError where there is none."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port found from {_PORTS.start} to {_PORTS.stop - 1}")


class ManagedServer:
    """One server in its own process group; ``{port}`` in the command is replaced by a free port.

    ``ready_seconds`` is the longest wait for a 200 of /health, ``grace_seconds`` the time from SIGTERM to SIGKILL.
    What it writes goes to a temporary file (``log_tail``), or to ``output``.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        environ: dict[str, str] | None = None,
        ready_seconds: float = 300.0,
        grace_seconds: float = 15.0,
        output: IO[bytes] | None = None,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._environ = {**os.environ, **(environ or {})}
        self._ready_seconds = ready_seconds
        self._grace_seconds = grace_seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts the process and returns at once, so that several servers can start together; the ``with`` block, or
        ``stop``, must follow. A second call does nothing."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output or self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> ManagedServer:
        self.launch()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process.pid

    def log_tail(self, size: int = 2000) -> str:
        """The last ``size`` bytes the server wrote."""
        length = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, length - size))
        tail = self._log.read().decode("utf-8", "replace")
        self._log.seek(0, os.SEEK_END)
        return tail

    def memory_bytes(self) -> int:
        """Resident memory of the server and all its descendants now, in bytes (shared pages count in each)."""
        return sum(resident_bytes(pid) for pid in descendants(self.pid))

    def child_pid(self) -> int:
        """The only child of the server process (its engine); 0 when there is none or more than one."""
        children = [pid for pid in descendants(self.pid)[1:] if parent_of(pid) == self.pid]
        return children[0] if len(children) == 1 else 0

    def wait(self, seconds: float) -> int:
        """The exit code of a server that was told to end; subprocess.TimeoutExpired when it does not."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process.wait(seconds)

    def stop(self) -> None:
        """SIGTERM, a grace time, then SIGKILL to whatever is left of the process group. Safe to call twice."""
        process = self._process
        if process is None:
            return
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._ready_seconds
        with httpx.Client(base_url=self.url, timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                code = self._process.poll() if self._process else None
                if code is not None:
                    raise ServerFailed(f"{self.name} ended with code {code} before it was ready:\n{self.log_tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        return
                time.sleep(0.1)
        raise ServerFailed(f"{self.name} was not ready after {self._ready_seconds:.0f} s:\n{self.log_tail()}")


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process through its ``with`` blocks (exit code 143), so that no server is left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def our_server(model_dir: str | Path, name: str, *extra: str, python: str = sys.executable) -> ManagedServer:
    """``python -m serve`` on a free port with further arguments."""
    command = [python, "-m", "serve", "--model-dir", str(Path(model_dir).resolve()), "--port", "{port}", *extra]
    # Variables of the graded contract must not leak from the caller's shell into a measured server.
    return ManagedServer(command, name, {"DRAFTER_BYO_DIR": "", "MODEL_DIR": "", "PORT": ""})


def naive_server(model_dir: str | Path, *extra: str, python: str = sys.executable) -> ManagedServer:
    """The naive reference server of this repository on a free port."""
    command = [python, "-m", "eval.naive", "--model-dir", str(Path(model_dir).resolve()), "--port", "{port}", *extra]
    return ManagedServer(command, "naive")


def descendants(root: int) -> list[int]:
    """``root`` and every process below it, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def parent_of(pid: int) -> int:
    """The parent's process id, 0 when the process is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def resident_bytes(pid: int) -> int:
    """Resident memory of one process, 0 when it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
