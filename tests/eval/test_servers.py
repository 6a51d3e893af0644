from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval.servers import ROOT, ManagedServer, ServerFailed, descendants, free_port

STUB = str(Path(__file__).with_name("stub_server.py"))
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
idle = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", idle])
sys.argv = ["stub", "--port", sys.argv[1]]
exec(compile(open({path!r}).read(), "stub", "exec"))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_ready_inside_the_block_and_gone_after_it() -> None:
    with ManagedServer([sys.executable, STUB, "--port", "{port}"], "stub") as server:
        assert alive(server.pid)
        assert server.memory_bytes() > 1_000_000
        pid = server.pid
    assert not alive(pid)


def test_children_that_ignore_sigterm_are_killed_with_the_group() -> None:
    code = STUBBORN.format(path=STUB)
    with ManagedServer([sys.executable, "-c", code, "{port}"], "stubborn", grace_seconds=0.2) as server:
        pids = descendants(server.pid)
        assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_a_server_that_dies_at_the_start_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(ServerFailed, match=r"code 3(?s:.*)no such model"), ManagedServer(command, "broken"):
        pass


def test_a_server_that_never_gets_ready_is_stopped() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = ManagedServer(command, "mute", ready_seconds=0.3, grace_seconds=0.5)
    with pytest.raises(ServerFailed, match="not ready after"), server:
        pass
    assert not any("time.sleep(600)" in cmdline for cmdline in own_children())


def own_children() -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(os.getpid())[1:] if alive(pid)]


def test_sigterm_to_the_command_stops_its_server_too() -> None:
    code = (
        "import sys, time\n"
        "from eval.servers import ROOT, ManagedServer, end_on_sigterm\n"
        "end_on_sigterm()\n"
        f"with ManagedServer([sys.executable, {STUB!r}, '--port', '{{port}}'], 'stub') as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.terminate()
    assert parent.wait(20) == 143
    assert not alive(child)
    parent.stdout.close()


def test_free_ports_can_be_listened_on_and_are_none_that_connections_are_given() -> None:
    with socket.socket() as here, socket.socket() as given:
        here.bind(("127.0.0.1", free_port()))
        here.listen()
        given.bind(("127.0.0.1", 0))
        assert here.getsockname()[1] < given.getsockname()[1]


def test_two_servers_start_together_and_one_that_was_launched_only_can_be_stopped() -> None:
    first, second = (ManagedServer([sys.executable, STUB, "--port", "{port}"], name) for name in ("first", "second"))
    first.launch()
    second.launch()
    pids = [first.pid, second.pid]
    with first:
        assert alive(pids[0])
        assert first.pid == pids[0]
        second.stop()
    assert not any(alive(pid) for pid in pids)
