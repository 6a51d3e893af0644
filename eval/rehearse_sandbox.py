"""The place a rehearsal runs in: the archive unpacked, read-only folders, the contract's variables, the guard.

It starts processes and ends every one of them; what they should do is for the phases to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval import rehearse_guard
from eval.rehearse_isolation import Isolation, bind_read_only, die_with_parent, unmount
from eval.servers import descendants, free_port

# Where the image's own libraries and cards are; not settings of the server.
IMAGE_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
GIB = 1024**3


class RehearsalError(Exception):
    """The rehearsal cannot go on; the message is the fault."""


@dataclass
class Sandbox:
    """Folders and variables of one rehearsal. Leave by ``close`` (a ``with`` block does it)."""

    work: Path
    isolation: Isolation
    python: str
    allow_jinja2: bool
    port: int = field(default_factory=free_port)
    has_home: bool = True
    has_drafter: bool = False
    mounted: list[Path] = field(default_factory=list)
    _snapshots: dict[Path, dict[str, tuple[int, int]]] = field(default_factory=dict)

    @property
    def submission(self) -> Path:
        return self.work / "submission"

    @property
    def model(self) -> Path:
        return self.work / "model"

    @property
    def drafter(self) -> Path:
        return self.work / "drafter"

    @property
    def events_file(self) -> Path:
        return self.work / "events.jsonl"

    def unpack(self, archive: Path) -> int:
        """The archive into a clean folder that is then read-only; how many files came. Check the archive first."""
        packed = self.work / "unpacked"
        with tarfile.open(archive, "r:gz") as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(packed, filter="data")
            else:
                tar.extractall(packed)  # links and paths were checked member by member  # nosec B202
        count = sum(path.is_file() for path in packed.rglob("*"))
        self._read_only(packed, self.submission)
        return count

    def mount_model(self, model_dir: Path) -> None:
        self._read_only(model_dir.resolve(), self.model)

    def mount_drafter(self, folder: Path) -> None:
        self._read_only(folder, self.drafter)
        self.has_drafter = True

    def _read_only(self, source: Path, target: Path) -> None:
        if self.isolation.mounts:
            target.mkdir()
            bind_read_only(source, target)
            self.mounted.append(target)
        else:
            target.symlink_to(source, target_is_directory=True)
        self._snapshots[source] = _snapshot(source)

    def written(self) -> list[str]:
        """Files that changed, came or went in a folder that should be read-only."""
        found = []
        for folder, before in self._snapshots.items():
            after = _snapshot(folder)
            found += [str(folder / name) for name in before.keys() ^ after.keys()]
            found += [str(folder / name) for name in before.keys() & after.keys() if before[name] != after[name]]
        return sorted(found)

    def install_guard(self) -> None:
        """Writes the import hook for the image's interpreter. RehearsalError when that interpreter is not usable."""
        if not Path(self.python).with_name("python3").exists():
            raise RehearsalError(f"there is no python3 beside {self.python}; start_server.sh calls it by that name")
        guard = self.work / "guard"
        guard.mkdir()
        source = Path(rehearse_guard.__file__).read_text(encoding="utf-8")
        (guard / "sitecustomize.py").write_text(source, encoding="utf-8")
        without = () if self.allow_jinja2 else rehearse_guard.JINJA
        command = [self.python, "-I", str(guard / "sitecustomize.py"), *without]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RehearsalError(f"{self.python} cannot list its packages: {done.stderr.strip()[-300:]}")
        names = json.loads(done.stdout)
        missing = sorted({"torch", "tokenizers", "safetensors", "numpy", "fastapi", "uvicorn"} - set(names))
        if missing:
            raise RehearsalError(f"{self.python} is not like the grading image: it lacks {', '.join(missing)}")
        settings = {
            "names": names,
            "roots": [f"{folder}{os.sep}" for folder in (self.submission, self.work / "unpacked")],
            "events": str(self.events_file),
            "refuse_network": not self.isolation.network,
        }
        (guard / "guard.json").write_text(json.dumps(settings), encoding="utf-8")

    def environ(self) -> dict[str, str]:
        """The contract's variables, and what any process of the image has."""
        home = self.work / "home"
        home.mkdir(exist_ok=True)
        folders = (os.path.dirname(self.python), "/usr/local/cuda/bin", "/usr/local/bin", "/usr/bin", "/bin")
        return {
            **{name: os.environ[name] for name in IMAGE_VARIABLES if name in os.environ},
            "PATH": os.pathsep.join(folders),
            **({"HOME": str(home)} if self.has_home else {}),
            "PYTHONPATH": str(self.work / "guard"),
            "MODEL_DIR": str(self.model),
            "PORT": str(self.port),
            **({"DRAFTER_BYO_DIR": str(self.drafter)} if self.has_drafter else {}),
        }

    def start(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """``sh script`` of the archive, in a session of its own, from a folder that is not the archive's."""
        with log.open("wb") as output:
            return subprocess.Popen(
                ["sh", str(self.submission / script)],
                cwd=self.work,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def events(self) -> list[dict[str, Any]]:
        """What the guard has seen so far."""
        if not self.events_file.exists():
            return []
        return [json.loads(line) for line in self.events_file.read_text().splitlines()]

    def close(self) -> None:
        """End every process below this one."""
        end_descendants()


@contextlib.contextmanager
def open_sandbox(
    isolation: Isolation, python: str | None, allow_jinja2: bool, has_home: bool = True
) -> Iterator[Sandbox]:
    """A sandbox in a temporary folder; everything in it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True) as name:
        sandbox = Sandbox(Path(name), isolation, python or sys.executable, allow_jinja2, has_home=has_home)
        try:
            yield sandbox
        finally:
            sandbox.close()
            # Before the folder is removed, or that would reach for what is mounted in it.
            for folder in sandbox.mounted:
                unmount(folder)


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative name -> (size, modification time in ns)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns if path.is_file() else 0)
    return found


def end_descendants() -> list[int]:
    """SIGKILL to everything below this process until nothing is left; the ids that had to be killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [pid for pid in descendants(os.getpid())[1:] if state_of(pid) not in ("Z", "")]
        for pid in left:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            break
        time.sleep(0.02)
    return sorted(killed)


def state_of(pid: int) -> str:
    """The process's state letter, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class MemoryWatch(threading.Thread):
    """Samples the resident memory of a process and all below it, twice a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._pid = pid
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, proportional_memory(self._pid))

    def stop(self) -> float:
        """Peak in GiB."""
        self._ended.set()
        self.join()
        return self.peak_bytes / GIB


def proportional_memory(root: int) -> int:
    """Bytes of ``root`` and its descendants, shared pages counted once (PSS)."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
