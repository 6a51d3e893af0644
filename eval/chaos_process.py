"""Faults of whole processes: killed, stopped, told to end, started twice. Each returns what was seen.

A fault is a function of a Lab that raises BrokenPromise or TimeoutError where the promise was not kept. It knows
signals; it does not know how the table is made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from eval.chaos_client import (
    DRAIN_SECONDS,
    Lab,
    Stream,
    alive,
    answer,
    check,
    ends,
    health,
    metrics,
    port_is_free,
    question,
    streams,
    wait_for,
)
from eval.chaos_engine import POISON_SEED
from eval.servers import ManagedServer

LONG = 1000
RED_SECONDS = 10.0


def engine_killed(lab: Lab) -> str:
    """SIGKILL to the engine under load, restart asked for."""
    return _gone_and_back(lab, signal.SIGKILL)


def engine_stopped(lab: Lab) -> str:
    """SIGSTOP to the engine under load, restart asked for."""
    return _gone_and_back(lab, signal.SIGSTOP)


def _gone_and_back(lab: Lab, number: signal.Signals) -> str:
    with lab.server("--restart-engine") as server:
        expected = answer(server.url)
        running = streams(server.url, 4, LONG, lab.seconds)
        engine = server.child_pid()
        os.kill(engine, number)
        red = wait_for(lambda: health(server.url) != 200, RED_SECONDS, "/health is not 200")
        how = ends(running, RED_SECONDS)
        check(how == "4 error frame", how)
        back = wait_for(lambda: health(server.url) == 200, lab.seconds, "the engine is back")
        check(server.child_pid() != engine, "the old engine is still there")
        check(not alive(engine), "the engine process is left")
        check(answer(server.url) == expected, "another text after the restart")
        check(
            metrics(server.url)["foretoken:engine_restarts_total"] == 1,
            "the restart is not counted",
        )
        return f"/health red after {red:.1f} s, streams: {how}; served again {back:.1f} s later, same text"


def engine_killed_for_good(lab: Lab) -> str:
    """SIGKILL to the engine, no restart asked for."""
    with lab.server() as server:
        os.kill(server.child_pid(), signal.SIGKILL)
        red = wait_for(lambda: health(server.url) == 503, RED_SECONDS, "/health is 503")
        late = Stream(server.url, question(8))
        how = ends([late], RED_SECONDS)
        check(how == "1 HTTP 503", how)
        code = _terminate(server, signal.SIGTERM, lab.seconds)
        check(code == 0, code)
        return f"/health 503 after {red:.1f} s and stays so, a new request: {how}; SIGTERM ends the server with 0"


def step_crashes(lab: Lab) -> str:
    """A kernel that reads address 0 while one request runs."""
    with lab.server("--restart-engine", fault="step-crashes") as server:
        others = streams(server.url, 2, LONG, lab.seconds)
        poison = Stream(server.url, question(8, seed=POISON_SEED))
        how = ends([poison, *others], RED_SECONDS)
        check("HUNG" not in how and "done" not in how, how)
        back = wait_for(lambda: health(server.url) == 200, lab.seconds, "the engine is back")
        check("Segmentation fault" in server.log_tail(1 << 20), "no crash report in the log")
        check(answer(server.url) != "", "an empty answer afterwards")
        return f"streams: {how}; crash report in the log; served again after {back:.1f} s"


def step_hangs(lab: Lab) -> str:
    """A step that does not come back."""
    with lab.server("--restart-engine", "--watchdog-seconds", "1", fault="step-hangs") as server:
        others = streams(server.url, 2, LONG, lab.seconds)
        started = time.monotonic()
        poison = Stream(server.url, question(8, seed=POISON_SEED))
        how = ends([poison, *others], lab.seconds)
        ended = time.monotonic() - started
        check(how in ("3 error frame", "1 HTTP 500, 2 error frame"), how)
        back = wait_for(lambda: health(server.url) == 200, lab.seconds, "the engine is back")
        log = server.log_tail(1 << 20)
        check("chaos_engine.py" in log, "the stack of the hung step is not in the log")
        check(answer(server.url) != "", "an empty answer afterwards")
        return f"streams: {how} after {ended:.1f} s; stack of the step in the log; served again {back:.1f} s later"


def front_killed(lab: Lab) -> str:
    """SIGKILL to the API process under load; the engine runs."""
    return _orphaned(lab, stopped=False)


def front_killed_engine_stopped(lab: Lab) -> str:
    """SIGKILL to the API process while the engine is stopped and cannot notice."""
    return _orphaned(lab, stopped=True)


def _orphaned(lab: Lab, stopped: bool) -> str:
    with lab.server() as server:
        running = streams(server.url, 2, LONG, lab.seconds)
        front, engine = server.pid, server.child_pid()
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        os.kill(front, signal.SIGKILL)
        gone = wait_for(lambda: not alive(engine), RED_SECONDS, "the engine has ended")
        free = wait_for(lambda: port_is_free(server.url), RED_SECONDS, "the port is free")
        how = ends(running, RED_SECONDS)
        check("HUNG" not in how, how)
        return f"engine gone after {gone:.1f} s, port free after {free:.1f} s more; streams: {how}"


def sigterm_short(lab: Lab) -> str:
    """SIGTERM to every process of the server while streams run that fit the drain time."""
    with lab.server("--drain-seconds", "30") as server:
        running = streams(server.url, 2, 24, lab.seconds)
        engine = server.child_pid()
        started = time.monotonic()
        os.kill(engine, signal.SIGTERM)
        code = _terminate(server, signal.SIGTERM, 40)
        took = time.monotonic() - started
        how = ends(running, 5)
        check((how, code) == ("2 done", 0), (how, code))
        check(not alive(engine), "the engine process is left")
        check(port_is_free(server.url), "the port is still taken")
        return f"streams: {how}; exit code 0 after {took:.1f} s, no process and no port left"


def sigterm_long(lab: Lab) -> str:
    """SIGTERM while streams run that are longer than the drain time."""
    with lab.server() as server:
        running = streams(server.url, 2, LONG, lab.seconds)
        engine = server.child_pid()
        started = time.monotonic()
        code = _terminate(server, signal.SIGTERM, DRAIN_SECONDS + 10)
        took = time.monotonic() - started
        how = ends(running, 5)
        check((how, code) == ("2 error frame", 0), (how, code))
        check(DRAIN_SECONDS - 0.5 <= took <= DRAIN_SECONDS + 8, took)
        check(not alive(engine), "the engine process is left")
        return f"drain time {DRAIN_SECONDS:g} s: streams: {how}; exit code 0 after {took:.1f} s, no process left"


def sigterm_twice(lab: Lab) -> str:
    """A second SIGTERM during the drain."""
    with lab.server("--drain-seconds", "60") as server:
        running = streams(server.url, 2, LONG, lab.seconds)
        engine = server.child_pid()
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.5)
        check(alive(engine), "the first signal did not drain")
        started = time.monotonic()
        _terminate(server, signal.SIGTERM, 10)
        took = time.monotonic() - started
        how = ends(running, 5)
        check("HUNG" not in how and "done" not in how, how)
        check(not alive(engine), "the engine process is left")
        return f"ended {took:.1f} s after the second signal (drain time 60 s); streams: {how}"


def port_in_use(lab: Lab) -> str:
    """A second server on the same port."""
    with lab.server() as server:
        started = time.monotonic()
        command = [sys.executable, "-m", "serve", "--model-dir", lab.model_dir, "--port", str(server.port)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=lab.seconds, check=False)
        took = time.monotonic() - started
        check(second.returncode == 1, second.returncode)
        (line,) = second.stderr.splitlines()
        check(str(server.port) in line, line)
        check("loading" not in second.stderr, "it began to load")
        check(health(server.url) == 200, "/health is not 200")
        return f'refused after {took:.1f} s, nothing loaded: "{line}"; the first server goes on'


def _terminate(server: ManagedServer, number: signal.Signals, seconds: float) -> int:
    """Send the signal to the API process and wait; its exit code."""
    os.kill(server.pid, number)
    return server.wait(seconds)
