"""The parts of a rehearsal on their own: timeline, isolation, ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eval.rehearse_phases import listening_ports
from eval.rehearse_timeline import Phase, Stopped, Timeline
from eval.servers import ROOT


def timeline() -> Timeline:
    return Timeline([Phase("a", "first"), Phase("b", "<second>", cap=0.0), Phase("c", "third")], "a <heading>")


def spoil(line: Timeline, name: str, *faults: str) -> None:
    with line.phase(name) as phase:
        for fault in faults:
            phase.fail(fault)


def test_a_fault_an_error_and_a_passed_cap_each_fail_their_phase() -> None:
    line = timeline()
    with pytest.raises(Stopped):
        spoil(line, "a", "one", "two")
    with pytest.raises(Stopped), line.phase("b"):
        pass
    with pytest.raises(Stopped), line.phase("c"):
        raise OSError("disk is full")
    assert [phase.faults for phase in line.phases] == [["one", "two"], ["took 0 s, cap 0 s"], ["disk is full"]]
    assert not line.passed


def test_a_phase_that_times_itself_is_not_timed_twice() -> None:
    line = Timeline([Phase("a", "first", cap=0.0, times_itself=True)], "heading")
    with line.phase("a"):
        pass
    assert line.passed


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_phase_has_not_passed(error: type[BaseException]) -> None:
    line = timeline()
    with pytest.raises(error), line.phase("a"):
        raise error
    assert line.phases[0].state == "FAILED"
    assert line.phases[0].faults == ["interrupted"]


def test_text_json_and_page_tell_the_same(tmp_path: Path) -> None:
    line = timeline()
    with line.phase("a") as phase:
        phase.detail = "all <well>"
    line.skip("b", "not wanted")
    with pytest.raises(Stopped):
        spoil(line, "c", "x > y")
    line.note("a & b")
    line.note("a & b")
    line.write(tmp_path)
    assert [phase["state"] for phase in line.to_json()["phases"]] == ["ok", "skipped", "FAILED"]
    assert line.text().count("note: a & b") == 1
    assert "! x > y" in line.text()
    page = (tmp_path / "timeline.html").read_text()
    for part in ("a &lt;heading&gt;: FAILED", "&lt;second&gt;", "all &lt;well&gt;", "x &gt; y", "a &amp; b"):
        assert part in page
    assert not any(word in page for word in ("<script", "src=", "href=", "@import", "url("))


ISOLATED = """
import socket, sys
from pathlib import Path
from eval.rehearse_isolation import bind_read_only, isolate, unmount
had = isolate()
source, target = Path(sys.argv[1]), Path(sys.argv[2])
if had.network:
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname(), 5).close()
    try:
        socket.create_connection(("192.0.2.7", 9), 5)
        sys.exit("the network is still there")
    except OSError:
        pass
if had.mounts:
    bind_read_only(source, target)
    assert (target / "file").read_text() == "text"
    for path in (target / "file", target / "new"):
        try:
            path.write_text("changed")
            sys.exit(f"{path} can be written")
        except OSError:
            pass
    unmount(target)
    assert not list(target.iterdir())
print(had.line())
"""


def test_the_network_is_gone_and_mounted_folders_are_read_only_where_the_kernel_allows(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "file").write_text("text")
    command = [sys.executable, "-c", ISOLATED, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "network namespace" in done.stdout or "audit hook" in done.stdout
    assert (source / "file").read_text() == "text"
    assert sorted(path.name for path in source.iterdir()) == ["file"]


def test_listening_ports_are_read_from_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in listening_ports(os.getpid())
    assert server.fileno() == -1
