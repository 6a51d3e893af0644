"""The engine as an operating-system process: started with one end of a socket pair, and never left behind.

It knows file descriptors and exit codes; it does not know what the messages mean.
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

ENGINE_COMMAND = (sys.executable, "-m", "serve.engine")
_ROOT = Path(__file__).resolve().parents[2]


def _environment(all_cores: bool) -> dict[str, str]:
    """Ours, with the math threads told to live with neighbours: this process wakes for every token on the same cores.

    A short spin before sleeping, and threads that stay on their own cores when they have all of them, are worth a tenth
    of a decode step. What the caller's environment says wins.
    """
    environment = {"GOMP_SPINCOUNT": "20000", **({"OMP_PROC_BIND": "true"} if all_cores else {}), **os.environ}
    environment["PYTHONPATH"] = _with_root(os.environ.get("PYTHONPATH"))
    return environment


class EngineProcess:
    """A running engine and our end of the pipe to it.

    The engine has its own session: Ctrl-C in a terminal reaches this process alone, which then decides. Its standard
    output goes to our standard error, so that ours holds the ready line and nothing else.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND, *, all_cores: bool = False) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
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
