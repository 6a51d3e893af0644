"""``python -m scripts.cluster.rehearse``: a real cluster on this machine, and a line for each fault. Linux.

Two replicas of the default model; one is killed under load, then the engine of one, then all are replaced while streams
run. Another cluster grows from one replica to two under load and shrinks again. The exit code is 1 when a promise was
broken. It knows processes and HTTP; it does not know Ray.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from eval.chaos_client import BrokenPromise, Stream, alive, check, ends, wait_for
from eval.servers import ROOT, ManagedServer, ServerFailed, descendants, end_on_sigterm, parent_of

_REPLICA = re.compile(r'vllm:(\w+)\{replica="(\w+)"[^}]*\} (\S+)')
CONVERSATIONS = 8
_MOST_STREAMS = 32


@dataclass(frozen=True)
class Cluster:
    """A running cluster. options: what it was started with; seconds: what takes longer counts as hung."""

    server: ManagedServer
    options: tuple[str, ...]
    tokens: int
    seconds: float

    @property
    def url(self) -> str:
        return self.server.url

    def values(self, metric: str) -> dict[str, float]:
        """A metric of vLLM's names, by replica; empty when nobody answers."""
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
            return {name: float(value) for found, name, value in _REPLICA.findall(page) if found == metric}
        return {}

    def replicas(self) -> set[str]:
        return set(self.values("num_requests_running"))

    def replica_pids(self) -> list[int]:
        """The processes of the replicas; the only child of each is its engine."""
        return [pid for pid in descendants(self.server.pid) if is_replica(pid)]

    def engine_of(self, replica: int) -> int:
        children = [pid for pid in descendants(replica)[1:] if parent_of(pid) == replica]
        check(len(children) == 1, f"{len(children)} engines under one replica")
        return children[0]

    def streams(self) -> list[Stream]:
        """Long streams in so many conversations that every replica has two; all have text already."""
        before = self.values("time_to_first_token_seconds_count")
        running: list[Stream] = []
        while len(running) < _MOST_STREAMS:
            running.append(Stream(self.url, conversation(len(running), self.tokens)))
            wait_for(lambda: bool(running[-1].text or running[-1].end), self.seconds, "the first text of a stream")
            now = self.values("time_to_first_token_seconds_count")
            if len(running) >= CONVERSATIONS and all(now[name] - before.get(name, 0) >= 2 for name in now):
                break
        return running


def conversation(number: int, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"Tell me story number {number}, with a lighthouse in it."}]
    return {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": tokens}


def keeps_conversations(cluster: Cluster) -> str:
    """A conversation stays with its replica."""
    hits = []
    for number in range(CONVERSATIONS):
        before = cluster.values("request_prompt_tokens_count")
        for _ in range(3):
            _ask(cluster.url, conversation(number, 2))
        after = cluster.values("request_prompt_tokens_count")
        hits.append([name for name in after if after[name] != before.get(name)])
    check(all(len(found) == 1 for found in hits), hits)
    spread = sorted(sum(found == [name] for found in hits) for name in cluster.replicas())
    return f"{CONVERSATIONS} conversations of 3 requests, each at one replica ({' and '.join(map(str, spread))})"


def replica_killed(cluster: Cluster) -> str:
    """SIGKILL to a replica's process under load."""
    return _kill(cluster, cluster.replica_pids()[0])


def engine_killed(cluster: Cluster) -> str:
    """SIGKILL to the engine of a replica under load."""
    return _kill(cluster, cluster.engine_of(cluster.replica_pids()[0]))


def _kill(cluster: Cluster, victim: int) -> str:
    before = cluster.replicas()
    check(len(before) == 2, before)
    engines = [cluster.engine_of(pid) for pid in cluster.replica_pids()]
    running = cluster.streams()
    time.sleep(1.5)
    shares = sorted(cluster.values("num_requests_running").values())
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    late = [_ask(cluster.url, conversation(number, 4)) for number in range(CONVERSATIONS)]
    asked = time.monotonic() - started
    how = ends(running, cluster.seconds)
    lost = sum(stream.end == "error frame" for stream in running)
    check(all(stream.end in ("error frame", "done") for stream in running), how)
    check(float(lost) in shares and 0 < lost < len(running), f"{how}, of shares {shares}")
    check(late == [200] * len(late), f"requests after the kill: {late}")

    def back() -> bool:
        now = cluster.replicas()
        return len(now) == 2 and now != before

    took = wait_for(back, cluster.seconds, "two replicas again") + time.monotonic() - started
    check(len(cluster.replicas() & before) == 1, "more than one replica is new")
    gone = [pid for pid in engines if not alive(pid)]
    check(len(gone) == 1, f"{len(gone)} of the old engines are gone")
    return (
        f"streams {'/'.join(f'{share:.0f}' for share in shares)}: {how}; {len(late)} requests within {asked:.1f} s "
        f"of the kill: all 200; two replicas again after {took:.1f} s"
    )


def all_replaced(cluster: Cluster) -> str:
    """A rolling restart while streams run."""
    before = cluster.replicas()
    running = cluster.streams()
    address = re.search(r"cluster=(\S+)", cluster.server.log_tail(1 << 20))
    assert address is not None
    started = time.monotonic()
    command = [*cluster.options, "--port", str(cluster.server.port), "--address", address[1], "--restart"]
    done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=None)
    codes: list[int] = []
    while done.poll() is None and time.monotonic() - started < cluster.seconds:
        codes.append(_ask(cluster.url, conversation(len(codes) % CONVERSATIONS, 4)))
    check(done.poll() == 0, f"the restart ended with {done.poll()}")
    how = ends(running, cluster.seconds)
    wait_for(lambda: len(cluster.replicas()) == 2, cluster.seconds, "two replicas")
    took = time.monotonic() - started
    check(how == f"{len(running)} done", how)
    check(not cluster.replicas() & before, "an old replica is left")
    check(codes == [200] * len(codes), f"requests meanwhile: {codes}")
    return f"both replicas new after {took:.1f} s; streams: {how}; {len(codes)} requests meanwhile: all 200"


def grows_and_shrinks(cluster: Cluster) -> str:
    """One replica becomes two while requests pile up, and one again when they are done."""
    check(len(cluster.replicas()) == 1, cluster.replicas())
    long = 3 * cluster.tokens  # a replica takes a while to start
    running = [Stream(cluster.url, conversation(number, long)) for number in range(CONVERSATIONS)]
    grown = wait_for(lambda: len(cluster.replicas()) == 2, cluster.seconds, "a second replica")
    late = [_ask(cluster.url, conversation(CONVERSATIONS + number, 4)) for number in range(CONVERSATIONS)]
    served = cluster.values("request_prompt_tokens_count")
    how = ends(running, cluster.seconds)
    idle = time.monotonic()
    wait_for(lambda: len(cluster.replicas()) == 1, cluster.seconds, "one replica again")
    shrunk = time.monotonic() - idle
    check(how == f"{len(running)} done" and late == [200] * len(late), f"{how}; {late}")
    check(len(served) == 2 and min(served.values()) > 0, f"requests by replica: {served}")
    check(_ask(cluster.url, conversation(0, 4)) == 200, "no answer after shrinking")
    return (
        f"two replicas {grown:.1f} s after {len(running)} streams came: {how}; one again {shrunk:.1f} s after the last"
    )


PROMISES: dict[str, Callable[[Cluster], str]] = {
    "keeps-conversations": keeps_conversations,
    "replica-killed": replica_killed,
    "engine-killed": engine_killed,
    "all-replaced": all_replaced,
}
GROWTH: dict[str, Callable[[Cluster], str]] = {"grows-and-shrinks": grows_and_shrinks}
PAIR = ("--replicas", "2")
GROWING = (
    *("--replicas", "1", "--max-replicas", "2", "--target-ongoing", "2"),
    *("--upscale-delay", "2", "--downscale-delay", "5"),
)


def _ask(url: str, body: dict[str, object]) -> int:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).status_code


def is_replica(pid: int) -> bool:
    """Whether the process is one that holds an engine: Ray puts the deployment's name on its command line."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.startswith(b"ray::ServeReplica:") and b":engine" in command.split(b".")[0]
    return False


def cluster_options(model_dir: str, replicas: tuple[str, ...]) -> tuple[str, ...]:
    """A small cluster on this machine, every replica with one thread."""
    return (
        *(sys.executable, "-m", "scripts.cluster", *replicas, "--cpus", "0.5", "--model-dir", model_dir),
        *("--threads", "1", "--kv-memory-mib", "128", "--drain-seconds", "60"),
    )


def rehearse(replicas: tuple[str, ...], promises: dict[str, Callable[[Cluster], str]], args: argparse.Namespace) -> int:
    """Starts a cluster and prints a line for each promise; how many were broken."""
    options = cluster_options(args.model_dir, replicas)
    started, broken, count = time.monotonic(), 0, int(replicas[1])
    with ManagedServer([*options, "--port", "{port}"], "cluster", grace_seconds=30) as server:
        cluster = Cluster(server, options, args.tokens, args.seconds)
        wait_for(lambda: len(cluster.replicas()) == count, args.seconds, f"{count} replicas")
        print(f"ok   {'start':<20} replicas: {count}, after {time.monotonic() - started:.1f} s", flush=True)
        for name, promise in promises.items():
            try:
                mark, seen = "ok  ", promise(cluster)
            except (BrokenPromise, TimeoutError, ServerFailed, OSError, httpx.HTTPError) as error:
                mark, seen = "FAIL", f"{type(error).__name__}: {error}"
                broken += 1
            print(f"{mark} {name:<20} {seen}", flush=True)
        if broken:
            print(server.log_tail(20000), file=sys.stderr)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.cluster.rehearse", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=sorted(PROMISES | GROWTH), metavar="NAME", help="just these")
    parser.add_argument("--model-dir", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--tokens", type=int, default=400, help="length of a stream (default: 400)")
    parser.add_argument("--seconds", type=float, default=120.0, help="what takes longer counts as hung (default: 120)")
    args = parser.parse_args()
    end_on_sigterm()
    # Of this rehearsal only; its second process has it from us.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    broken = 0
    for replicas, promises in ((PAIR, PROMISES), (GROWING, GROWTH)):
        wanted = {name: promise for name, promise in promises.items() if name in (args.only or promises)}
        if wanted:
            broken += rehearse(replicas, wanted, args)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
