"""Public bug reports about load and life cycle, tried at the size in which they were reported.

A long prompt beside running streams, a server that is ended under load, ranks that wait for a slow save. It knows the
API and /proc, not the engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from eval.chaos_client import Lab, alive, answer, check, ends, health, port_is_free, streams, wait_for
from eval.servers import ROOT, ManagedServer, descendants

STREAM_TOKENS = 500
DRAIN_SECONDS = 10
GONE_SECONDS = 30.0


class Timed(threading.Thread):
    """One stream and when each of its events came, in seconds of ``time.monotonic``."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.sent = time.monotonic()
        self.times: list[float] = []
        self.last = ""
        self._url, self._body = url, {**body, "stream": True}
        self.start()

    def run(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=1800, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.times.append(time.monotonic())
                    self.last = line[6:]

    def first(self) -> float:
        """Seconds to the first event."""
        return self.times[0] - self.sent

    def gaps(self, begin: float, end: float) -> list[float]:
        """Waits between events that touch the time from ``begin`` to ``end``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


def long_prompt_beside_streams(lab: Lab) -> str:
    """B34: a stream of 500 tokens, after a second a prompt that fills the context, then a short one."""
    with lab.server("--kv-memory-mib", "1024") as server:
        context = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"]
        common = {"temperature": 0, "ignore_eos": True}
        running = Timed(server.url, {"prompt": "The lighthouse", "max_tokens": STREAM_TOKENS, **common})
        time.sleep(1)
        ids = [1000 + i * 7919 % 40000 for i in range(context - 20)]
        long = Timed(server.url, {"prompt": ids, "max_tokens": 8, **common})
        time.sleep(0.2)
        short = Timed(server.url, {"prompt": "A short question:", "max_tokens": 8, **common})
        for stream in (running, long, short):
            stream.join(1800)
            check(stream.last == "[DONE]", f"a stream ended with {stream.last[:100]}")
        prefill = long.first()
        gaps = running.gaps(long.sent, long.times[0])
        check(bool(gaps), "the stream had ended before the long prompt came")
        figures = (
            f"prompt of {len(ids)}: first token after {prefill:.1f} s; largest gap of the stream {max(gaps):.2f} s"
        )
        figures += f" ({max(gaps) / prefill:.0%}), first token of the short one {short.first():.2f} s"
        check(max(gaps) < prefill / 4, figures)
        check(short.first() < prefill / 4, figures)
        return figures


def ended_under_load(lab: Lab) -> str:
    """B39: SIGTERM with four streams running, and SIGKILL to the front process; each time a restart on the port."""
    return "; ".join(_ended_by(lab, number) for number in (signal.SIGTERM, signal.SIGKILL))


def _ended_by(lab: Lab, number: signal.Signals) -> str:
    with lab.server("--drain-seconds", str(DRAIN_SECONDS)) as server:
        running = streams(server.url, 4, STREAM_TOKENS * 4, lab.seconds)
        processes = descendants(server.pid)
        started = time.monotonic()
        os.kill(server.pid, number)
        wait_for(lambda: health(server.url) != 200, 5, "no new work is taken")
        wait_for(lambda: not any(alive(pid) for pid in processes), DRAIN_SECONDS + GONE_SECONDS, "all have ended")
        took = time.monotonic() - started
        how = ends(running, 5)
        check("HUNG" not in how, how)
        check(port_is_free(server.url), "the port is still taken")
        with _on_port(lab, server.port) as second:
            check(answer(second.url) != "", "an empty answer after the restart")
        return f"{number.name}: {len(processes)} processes gone after {took:.1f} s, streams: {how}, port served again"


def _on_port(lab: Lab, port: int) -> ManagedServer:
    command = [sys.executable, "-m", "serve", "--model-dir", lab.model_dir, "--port", str(port), "--threads", "1"]
    server = ManagedServer(command, "restarted", {"DRAFTER_BYO_DIR": "", "MODEL_DIR": "", "PORT": ""})
    server.port, server.url = port, f"http://127.0.0.1:{port}"
    return server


def slow_save(lab: Lab) -> str:
    """B44: two ranks with 5 and with 7 samples, and 90 s in the first rank's save under a limit of 60 s."""
    tests = [
        "tests/known_failures/slow_save.py",
        "tests/drafter_train/test_resume.py::test_ranks_with_uneven_shares_finish",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    check(done.returncode == 0, done.stdout[-1500:])
    return f"both sizes and the slow save finish, {time.monotonic() - started:.0f} s"
