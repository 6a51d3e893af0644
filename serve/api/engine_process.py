"""The engine as an operating-system process: started with one end of a socket pair, and never left behind.

It knows file descriptors, signals and exit codes; it does not know what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from serve.api.auth import ENVIRONMENT_NAME

ENGINE_COMMAND = (sys.executable, "-m", "serve.engine")
# glibc raises its threshold to the largest block ever freed, and keeps such blocks from then on: an engine's memory
# creeps up with every unusually large step. With a fixed threshold they go back to the system.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
_ROOT = Path(__file__).resolve().parents[2]


def _environment(all_cores: bool) -> dict[str, str]:
    """Ours, with the math threads told to live with neighbours: this process wakes for every token on the same cores.

    A short spin before sleeping, and threads that stay on their own cores when they have all of them, are worth a tenth
    of a decode step. What the caller's environment says wins. The API key stays here: the engine has no use for it.
    """
    pinned = {"OMP_PROC_BIND": "true"} if all_cores else {}
    environment = {"GOMP_SPINCOUNT": "20000", **_MALLOC, **pinned, **os.environ}
    environment["PYTHONPATH"] = _with_root(os.environ.get("PYTHONPATH"))
    environment.pop(ENVIRONMENT_NAME, None)
    return environment


class EngineProcess:
    """A running engine and our end of the pipe to it.

    The engine has its own session: Ctrl-C in a terminal reaches this process alone, which then decides. Its standard
    output and error go to ``output``, by default our standard error, so that our standard output holds the ready line
    and nothing else.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND, *, all_cores: bool = False, output: int = 2) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(all_cores),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Block up to that long for the end of the process; its exit code or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def is_runnable(self) -> bool:
        """Whether any of its threads has something to compute: working, or waiting for a core. Only Linux can tell."""
        for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] == "R":
                    return True
        return False

    def dump_stacks(self) -> None:
        """Ask it to write the stacks of all its threads. Only for an engine that has been ready: it must know how."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End it at once, with everything it started; works on a stopped process too."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


def _with_root(python_path: str | None) -> str:
    """So that the child finds the package that this process runs, from whatever folder that was started."""
    return os.pathsep.join([str(_ROOT), *([python_path] if python_path else [])])
