"""What happens in each phase of a rehearsal once the archive lies unpacked: set-up, start, gate, scenarios, end.

One server process lives through all of them. It knows how a grader looks at a server; it does not know how the sandbox
is made or how a phase is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from eval.client import TokenizerCounter, open_client, served_model
from eval.gate import Question, judge
from eval.rehearse_reference import Reference
from eval.rehearse_sandbox import MemoryWatch, RehearsalError, Sandbox, state_of
from eval.rehearse_timeline import Phase, Timeline
from eval.scenarios import Scenario, Shapes, baseline_wall, run_scenario
from eval.servers import descendants

SETUP_CAP, START_CAP = 600.0, 300.0
STOP_SECONDS = 40.0
MEMORY_CAP_GIB = 32.0
SCENARIOS = {"chat": "S1", "long": "S2", "burst": "S3"}


class Rehearsal:
    """One server from ``sh start_server.sh`` to its end, with everything that was seen of it."""

    def __init__(
        self, timeline: Timeline, sandbox: Sandbox, reference: Reference, examples: Sequence[Question], shapes: Shapes
    ) -> None:
        self.timeline = timeline
        self.scenarios: list[Scenario] = []
        self._sandbox = sandbox
        self._reference = reference
        self._examples = examples
        self._shapes = shapes
        self._url = f"http://127.0.0.1:{sandbox.port}"
        self._server: subprocess.Popen[bytes] | None = None
        self._others: set[int] = set()
        self._processes: dict[int, str] = {}
        self._memory: MemoryWatch | None = None
        self._engine: dict[str, Any] = {}
        self.server_log = sandbox.work / "server.log"
        self.setup_log = sandbox.work / "setup.log"

    def serve(self) -> None:
        """From the start to the end, in the grader's order. ``Stopped`` comes out of the first phase that fails."""
        with self.timeline.phase("start") as phase:
            self._start(phase)
        with self.timeline.phase("gate") as phase:
            self._gate(phase)
        for name in SCENARIOS:
            with self.timeline.phase(name) as phase:
                self._scenario(phase)
        with self.timeline.phase("stop") as phase:
            self._stop(phase)

    def set_up(self) -> None:
        """``sh setup.sh`` where the archive has one."""
        if not (self._sandbox.submission / "setup.sh").is_file():
            self.timeline.skip("setup", "the archive has no setup.sh")
            return
        with self.timeline.phase("setup") as phase:
            process = self._sandbox.start("setup.sh", self.setup_log)
            try:
                code = process.wait(SETUP_CAP)
            except subprocess.TimeoutExpired:
                raise RehearsalError(f"still running after {SETUP_CAP:.0f} s\n{tail(self.setup_log)}") from None
            if code:
                raise RehearsalError(f"ended with code {code}\n{tail(self.setup_log)}")
            home = self._sandbox.work / "home"
            left = [path for path in home.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in left)
            phase.data = {"files_cached": len(left), "bytes_cached": size}
            last = tail(self.setup_log, 300).strip().splitlines()
            said = f"; {last[-1]}" if last else ""
            phase.detail = f"{len(left)} files, {size / 1e6:.1f} MB in the caches{said}"

    def _start(self, phase: Phase) -> None:
        self._others = set(descendants(os.getpid()))
        self._server = self._sandbox.start("start_server.sh", self.server_log)
        self._memory = MemoryWatch(self._server.pid)
        self._memory.start()
        self._wait_ready(phase.cap or START_CAP)
        with httpx.Client(base_url=self._url, timeout=10, trust_env=False) as client:
            if client.get("/health").status_code == 200:
                version = client.get("/version")
                self._engine = version.json().get("engine", {}) if version.status_code == 200 else {}
        self._processes = self._alive()
        engine = self._engine
        phase.data = {"engine": {key: value for key, value in engine.items() if key != "costs"}}
        drafter = engine.get("drafter")
        phase.detail = (
            f"ready; {engine.get('kernel_path', '?')}; weights {engine.get('weights', '?')}; drafter: {drafter}"
        )
        if self._sandbox.has_drafter and not drafter:
            phase.fail(f"DRAFTER_BYO_DIR is set but the server drafts without it: {engine.get('warnings')}")
        unguarded = sorted(self._pythons() - {event["pid"] for event in self._sandbox.events()})
        if unguarded:
            phase.fail(f"processes {unguarded} run Python without the import guard (python -I, -E or -S?)")
        for line in self.server_log.read_text("utf-8", "replace").splitlines():
            if re.search(r"WRONG MODEL\?|WITHOUT the drafter", line):
                self.timeline.note(line.strip())

    def _wait_ready(self, cap: float) -> None:
        assert self._server is not None
        deadline = time.monotonic() + cap
        with httpx.Client(base_url=self._url, timeout=2, trust_env=False) as client:
            while time.monotonic() < deadline:
                code = self._server.poll()
                if code is not None:
                    raise RehearsalError(f"start_server.sh ended with code {code}\n{tail(self.server_log)}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        return
                time.sleep(0.05)
        others = sorted(listening_ports(self._server.pid) - {self._sandbox.port})
        hint = f"; it listens on {others} instead of PORT={self._sandbox.port}" if others else ""
        raise RehearsalError(f"no 200 from {self._url}/health within {cap:.0f} s{hint}\n{tail(self.server_log)}")

    def _gate(self, phase: Phase) -> None:
        verdict = asyncio.run(judge(self._url, self._reference.kept, self._examples))
        phase.detail = (
            f"{verdict.agreed}/{verdict.asked} = {verdict.interval.value:.1%} as the reference "
            f"(95 % interval {verdict.interval.low:.1%} .. {verdict.interval.high:.1%})"
        )
        phase.data = {"asked": verdict.asked, "agreed": verdict.agreed, "different": list(verdict.different)}
        if verdict.failed:
            phase.fail(f"{verdict.failed} requests failed")
        if not verdict.passed:
            phase.fail(f"INCORRECT: agreement below 95 % ({', '.join(verdict.different)})")
        elif verdict.warned:
            self.timeline.note(f"gate: {verdict.lines()[-1]}")
        self._same_processes(phase)

    def _scenario(self, phase: Phase) -> None:
        name = SCENARIOS[phase.name]
        phase.cap = self._shapes.cap_factor * baseline_wall(name, self._shapes, self._reference.baseline)
        counter = TokenizerCounter(self._sandbox.model)

        async def run() -> Scenario:
            async with open_client(self._url) as client:
                model = await served_model(client)
                return await run_scenario(client, model, name, self._shapes, self._reference.baseline, counter)

        result = asyncio.run(run())
        self.scenarios.append(result)
        phase.detail = result.line()
        phase.data = {"status": result.status, "value": result.value, "speedup": result.speedup, **result.details}
        if result.status != "ok":
            phase.fail(f"{result.status}: {result.details.get('errors') or result.line()}".removeprefix("TIMEOUT: "))
        self._same_processes(phase)

    def _same_processes(self, phase: Phase) -> None:
        """The whole run is one server without a restart."""
        now = self._alive()
        gone = [pid for pid in self._processes if self._processes[pid] != now.get(pid)]
        if gone:
            phase.fail(
                f"processes {gone} of the server were restarted or ended during the run\n{tail(self.server_log)}"
            )

    def _stop(self, phase: Phase) -> None:
        assert self._server is not None
        assert self._memory is not None
        with httpx.Client(base_url=self._url, timeout=10, trust_env=False) as client:
            if client.get("/health").status_code != 200:
                phase.fail("/health is not 200 after the burst")
        self._server.send_signal(signal.SIGTERM)
        try:
            code = self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            phase.fail(f"still there {STOP_SECONDS:.0f} s after SIGTERM")
            code = None
        left = [pid for pid in descendants(os.getpid()) if pid not in self._others and state_of(pid) not in ("Z", "")]
        if left:
            phase.fail(f"processes {left} outlived the server")
        peak = self._memory.stop()
        phase.data = {"exit_code": code, "peak_gib": round(peak, 2)}
        phase.detail = f"exit code {code} after SIGTERM, nothing left; peak memory {peak:.2f} GiB"
        if peak > MEMORY_CAP_GIB:
            phase.fail(f"peak memory {peak:.1f} GiB, the grader's host has {MEMORY_CAP_GIB:.0f}")
        for path in self._sandbox.written():
            phase.fail(f"{path} is read-only in a graded run, but was changed")
        events = self._sandbox.events()
        for target in sorted({event["to"] for event in events if event["event"] == "network"}):
            phase.fail(f"a connection to {target} was tried; a graded run has no network")
        hidden = sorted({event["name"] for event in events if event["event"] == "hidden"})
        self.timeline.facts["hidden_packages"] = hidden
        if hidden:
            self.timeline.note(f"asked for but hidden, as not in the grading image: {', '.join(hidden)}")

    def _alive(self) -> dict[int, str]:
        """The server's processes with their start times: the same pair is the same process."""
        assert self._server is not None
        found = {}
        for pid in descendants(self._server.pid):
            with contextlib.suppress(OSError, IndexError):
                found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return found

    def _pythons(self) -> set[int]:
        assert self._server is not None
        found = set()
        for pid in descendants(self._server.pid):
            with contextlib.suppress(OSError):
                if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                    found.add(pid)
        return found


def listening_ports(root: int) -> set[int]:
    """TCP ports that ``root`` and its descendants listen on, from /proc."""
    inodes = set()
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                if found:
                    inodes.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{root}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def tail(path: Path, size: int = 1500) -> str:
    """The end of a log."""
    return path.read_bytes()[-size:].decode("utf-8", "replace") if path.exists() else ""
