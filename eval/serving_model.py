"""What a server does with a closed loop of equal requests, predicted: steps as the scheduler forms them, each as long
as its kernels or as the host that starts them, and a front that passes one request and one event after the other.

A step of decoding rows alone replays a graph, and so does one with few prompt rows; one with many is started kernel
by kernel and cannot be shorter than that takes. The clients start together, so prompts come in waves, as in a sweep.
Plain decoding: no drafts and no reuse of prompts. It runs nothing; the times of kernels are ``eval.kernel_model``'s or
the roofline's.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

from eval.kernel_model import KernelTimes
from eval.roofline import Roofline
from eval.stats import percentile

ROUNDS = 6
"""Answers of each stream after which more of the same would tell nothing new."""
PAGE = 32


@dataclass(frozen=True)
class Host:
    """Seconds of the host. ``prompt_pass``: starting the kernels of a step with more than ``graph_rows`` prompt rows (a
    graph, up to them); ``step``: what a graph's replay leaves uncovered; ``request`` and ``event``: of the API
    process (or of a client slower than it); ``delay``: of a request on its way, which holds nobody else up."""

    prompt_pass: float = 0.0116
    step: float = 0.0
    request: float = 0.0003
    event: float = 65e-6
    graph_rows: int = 0
    delay: float = 0.014


HOST_SOURCE = (
    "host times: 11.6 ms to start the kernels of a pass with prompt rows, measured in the engine; 0.3 ms a request, "
    "65 us an event and 14 ms of a request's way, fitted to a sweep of 1 to 128 streams with up to eight client "
    "processes; one H200 machine, 2026-11-30"
)


class StepTimes(Protocol):
    """Seconds of a step on the device."""

    def decode(self, sequences: int, context: float) -> float: ...

    def prompt(self, rows: int, length: int) -> float:
        """``rows`` rows of prompts of ``length`` tokens."""
        ...


@dataclass(frozen=True)
class RooflineTimes:
    """Steps from bandwidth and peak compute; prompts at ``compute_share`` of the peak."""

    roofline: Roofline
    compute_share: float = 0.6

    def decode(self, sequences: int, context: float) -> float:
        return self.roofline.step_seconds(sequences, context)

    def prompt(self, rows: int, length: int) -> float:
        least = self.roofline.prefill_seconds(1, self.compute_share)
        return max(least, self.roofline.prefill_seconds(length, self.compute_share) * rows / length)


@dataclass(frozen=True)
class KernelStepTimes:
    """Steps from what the kernels of this repository move and compute."""

    kernels: KernelTimes

    def decode(self, sequences: int, context: float) -> float:
        return self.kernels.step_ms(sequences, 1, max(1, round(context))) / 1e3

    def prompt(self, rows: int, length: int) -> float:
        whole = self.kernels.prompt_ms(length) * rows / length
        return max(whole, self.kernels.step_ms(1, 1, length)) / 1e3


@dataclass(frozen=True)
class Closed:
    """``streams`` clients, each sending the next request when its answer is there, for ``seconds`` (the window in which
    tokens count). ``batch_tokens`` and ``most``: rows and sequences of a step at most."""

    streams: int
    prompt: int
    output: int
    seconds: float
    batch_tokens: int
    most: int


@dataclass(frozen=True)
class Served:
    """Means over the window; ``ttft`` also its p50 and p99. Shares of the engine's time: decoding, prompts on the
    device, prompts waiting for the host, nothing to do; ``front`` is the share that the API process worked."""

    tokens_per_second: float
    ttft: float
    ttft_p50: float
    ttft_p99: float
    tpot: float
    decode_share: float
    prompt_share: float
    host_share: float
    idle_share: float
    front: float
    seconds: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class _Stream:
    """One running request: when it was sent, rows of its prompt to go, when its first token was delivered."""

    sent: float
    left: int
    first: float = 0.0


class _Run:
    """The state of one simulation. Times are seconds from the first send."""

    def __init__(self, load: Closed, times: StepTimes, host: Host) -> None:
        self.load, self.times, self.host = load, times, host
        self.now = self.front_free = self.front_busy = self.delivered = 0.0
        self.arrivals: list[tuple[float, int, _Stream]] = []
        self.waiting: deque[_Stream] = deque()
        self.prefills: deque[_Stream] = deque()
        self.ends: dict[int, list[_Stream]] = {}
        self.decoding = self.positions = self.step = self.sent = 0
        self.spent = {"decode": 0.0, "prompt": 0.0, "host": 0.0, "idle": 0.0}
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.tokens = 0
        self.steps: dict[tuple[int, int], float] = {}

    def send(self, at: float) -> None:
        """A client's next request reaches the front, which has what came before it to do first."""
        self.front_free = max(self.front_free, at) + self.host.request
        self.front_busy += self.host.request
        self.sent += 1
        heapq.heappush(self.arrivals, (self.front_free + self.host.delay, self.sent, _Stream(at, self.load.prompt)))

    def run(self) -> Served:
        for _ in range(self.load.streams):
            self.send(0.0)
        most = self.load.streams * ROUNDS
        while self.now < self.load.seconds and len(self.tpot) < most:
            self._take_in()
            self._one_step()
        return self._result()

    def _take_in(self) -> None:
        busy = self.decoding or self.prefills or self.waiting
        if not busy and self.arrivals[0][0] > self.now:
            self.spent["idle"] += self.arrivals[0][0] - self.now
            self.now = self.arrivals[0][0]
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self.waiting.append(heapq.heappop(self.arrivals)[2])
        while self.waiting and self.decoding + len(self.prefills) < self.load.most:
            self.prefills.append(self.waiting.popleft())

    def _one_step(self) -> None:
        rows, finished = 0, []
        room = self.load.batch_tokens - self.decoding
        while self.prefills and room > rows:
            stream = self.prefills[0]
            part = min(stream.left, room - rows)
            stream.left -= part
            rows += part
            if stream.left:
                break
            finished.append(self.prefills.popleft())
        decoding = self.decoding
        context = self.positions / decoding if decoding else 0.0
        spent = self._decode(decoding, context) if decoding else 0.0
        if rows:
            device = self.times.prompt(rows, self.load.prompt)
            if decoding:  # the weights are read once for both: decoding rows add what is theirs
                device = max(spent, device + spent - self._decode(1, context))
            launch = self.host.prompt_pass if rows > self.host.graph_rows else self.host.step
            waits = max(0.0, launch - device)
            self.spent["prompt"] += device
            self.spent["host"] += waits
            self.now += device + waits
        else:
            self.spent["decode"] += spent + self.host.step
            self.now += spent + self.host.step
        self._deliver(decoding, finished)

    def _decode(self, sequences: int, context: float) -> float:
        """A decode step; contexts within a page of each other share one calculation."""
        key = (sequences, int(context) // PAGE)
        if key not in self.steps:
            self.steps[key] = self.times.decode(sequences, key[1] * PAGE + PAGE / 2)
        return self.steps[key]

    def _deliver(self, decoding: int, finished: list[_Stream]) -> None:
        self.step += 1
        self.positions += decoding
        events = decoding + len(finished)
        self.front_free = max(self.front_free, self.now) + events * self.host.event
        self.front_busy += events * self.host.event
        self.delivered = self.front_free
        if self.delivered <= self.load.seconds:
            self.tokens += events
        done = self.ends.pop(self.step, [])
        for stream in finished:
            stream.first = self.front_free
            self.ttft.append(stream.first - stream.sent)
            self.decoding += 1
            self.positions += self.load.prompt
            if self.load.output > 1:
                self.ends.setdefault(self.step + self.load.output - 1, []).append(stream)
            else:
                done.append(stream)
        for stream in done:
            self.decoding -= 1
            self.positions -= self.load.prompt + self.load.output - 1
            self.tpot.append((self.front_free - stream.first) / max(1, self.load.output - 1))
            self.send(self.front_free)

    def _result(self) -> Served:
        seconds = min(max(self.now, self.delivered), self.load.seconds)
        shares = {name: value / self.now for name, value in self.spent.items()}
        ttft = self.ttft or [self.now]
        return Served(
            tokens_per_second=self.tokens / seconds,
            ttft=fmean(ttft),
            ttft_p50=percentile(ttft, 50),
            ttft_p99=percentile(ttft, 99),
            tpot=fmean(self.tpot) if self.tpot else 0.0,
            decode_share=shares["decode"],
            prompt_share=shares["prompt"],
            host_share=shares["host"],
            idle_share=shares["idle"],
            front=self.front_busy / max(self.now, self.front_free),
            seconds=seconds,
        )


def serve(load: Closed, times: StepTimes, host: Host) -> Served:
    """The closed loop, step by step, until its seconds are over or every stream has had ROUNDS answers."""
    return _Run(load, times, host).run()


def served_lines(served: dict[str, dict[str, Any]]) -> list[str]:
    """A table of several loads as text."""
    head = f"  {'streams':>8}{'tok/s':>10}{'TTFT p50/p99 ms':>20}{'TPOT ms':>10}"
    lines = [f"{head}   engine: decode, prompts, host, idle; API process"]
    for streams, row in served.items():
        ttft = f"{row['ttft_p50'] * 1e3:.1f}/{row['ttft_p99'] * 1e3:.1f}"
        shares = ", ".join(f"{row[name]:.0%}" for name in ("decode_share", "prompt_share", "host_share", "idle_share"))
        lines.append(f"  {streams:>8}{row['tokens_per_second']:>10.0f}{ttft:>20}{row['tpot'] * 1e3:>10.2f}   {shares}"
                     f"; {row['front']:.0%}")  # fmt: skip
    return lines
