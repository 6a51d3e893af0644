"""One writer a folder: a file in it that is locked for as long as the writer lives, however it ends.

The lock is the kernel's (flock), so nothing stale is left: the file stays, and says who had it last. It does not know
what is written.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderBusy(OSError):
    """Another process writes this folder; the message names it."""


@contextmanager
def only_writer(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Holds ``folder/name``; makes the folder. Raises FolderBusy at once when another process holds it.

    A file system without such locks does not stop a run: there it is as if this were not here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode("utf-8", "replace").strip() or "unknown"
            raise FolderBusy(f"{folder} is being written by another process ({holder}): end that one first") from None
        except OSError:
            pass
        else:
            os.ftruncate(file, 0)
            os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(file)
