"""What the kernel can take away from this process: the network, and write access to folders. Linux, through libc.

Entered once, at the start of a rehearsal, by the process that will start the server and measure it, so that both share
one loopback. Where the kernel refuses, the reason is kept and weaker means take over. It knows no archive, no server.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
# statvfs flags that a remount in a user namespace must keep, with their mount flags.
_KEPT = ((0x2, 0x2), (0x4, 0x4), (0x8, 0x8), (0x400, 0x400), (0x800, 0x800), (0x1000, 0x200000))
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


@dataclass(frozen=True)
class Isolation:
    """What was had. ``reason``: why it was not all of it."""

    network: bool
    mounts: bool
    reason: str = ""

    def line(self) -> str:
        """What a reader of the report has to know."""
        network = "network namespace" if self.network else "Python connections refused by an audit hook"
        mounts = "read-only mounts" if self.mounts else "folders compared before and after"
        return f"{network}; {mounts}" + (f" ({self.reason})" if self.reason else "")


def isolate() -> Isolation:
    """Give this process a network of its own (loopback alone) and mounts of its own. Call it while single-threaded."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    wanted = _CLONE_NEWNS | _CLONE_NEWNET | (_CLONE_NEWUSER if user else 0)
    if libc.unshare(wanted) != 0:
        return Isolation(False, False, f"unshare: {os.strerror(ctypes.get_errno())}")
    try:
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _loopback_up()
    except OSError as error:
        # A network without loopback would be no rehearsal at all; there is no way back, so say it and stop.
        raise RuntimeError(f"the network namespace has no loopback: {error}; use --no-namespaces") from error
    try:
        _mount(libc, None, "/", _MS_REC | _MS_PRIVATE)
    except OSError as error:
        return Isolation(True, False, f"mount: {error.strerror}")
    return Isolation(True, True)


def bind_read_only(source: Path, target: Path) -> None:
    """``source`` appears at ``target`` (an empty folder) and cannot be written there. Needs ``Isolation.mounts``.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _mount(libc, str(source), str(target), _MS_BIND | _MS_REC)
    flags = os.statvfs(target).f_flag
    kept = sum(mount for stat, mount in _KEPT if flags & stat)
    _mount(libc, None, str(target), _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def unmount(target: Path) -> None:
    """Takes a ``bind_read_only`` away, also while something still uses it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(target), _MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def adopt_orphans() -> None:
    """Processes whose parent ends become our children: none can slip away."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """For a child just forked: SIGKILL when the parent dies, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _mount(libc: ctypes.CDLL, source: str | None, target: str, flags: int) -> None:
    name = None if source is None else os.fsencode(source)
    if libc.mount(name, os.fsencode(target), None, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
