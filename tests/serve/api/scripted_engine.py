"""A stand-in for the engine process: speaks serve/protocol.py, has no model, and does what the prompt tells it.

Token id b (0 to 255) is byte b. A prompt may hold commands between exclamation marks:
    !say:TEXT!     answer TEXT (default "ok then"), END (257) after it; !hex:BYTES! the same in hexadecimal digits
    !chunk:N!      N tokens an output (default 2)
    !slow:S!       wait S seconds before every output
    !spin:N!       compute for 2.5 seconds, saying nothing, when N tokens have been sent
    !die:N!        kill itself when N tokens have been sent; !hang:N! stops itself instead
    !error:N!      end the request with an error after N tokens
    !garbage:N!    send bytes that are no frame after N tokens
Every message that arrives is appended to the file in argv[1] as a JSON line, prompt ids as a list. argv[2] names the
behaviour at start: ready, fatal, exit, never (ready never comes), late (after a second).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import re
import select
import signal
import socket
import sys
import time
from typing import Any

from serve.protocol import EngineStats, FrameDecoder, Output, SamplingParams, TokenLogprob, encode_frame, unpack_ids

END = 257
STATS_SECONDS = 0.2
INFO = {
    "model_dir": "m",
    "max_model_len": 512,
    "kv_pages": 64,
    "page_size": 32,
    "vocab_size": 300,
    "weights": "fp32",
    "kernel_path": "scripted engine, no kernels",
    "kernels": "scripted",
    "proposer": "lookup",
    "drafter": None,
    "block_length_max": 7,
    "device": "cpu",
    "warnings": [],
}


class Answer:
    """One running request."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.id: str = message["id"]
        self.prompt: list[int] = message["prompt_ids"]
        self.params = SamplingParams.from_json(message["params"])
        text = bytes(i for i in self.prompt if i < 256).decode("utf-8", "replace")
        commands = dict(re.findall(r"!(\w+):([^!]*)!", text))
        self.todo = list(
            bytes.fromhex(commands["hex"]) if "hex" in commands else commands.get("say", "ok then").encode()
        )
        self.chunk = int(commands.get("chunk", 2))
        self.pause = float(commands.get("slow", 0))
        self.faults = {
            name: int(commands[name]) for name in ("die", "hang", "error", "garbage", "spin") if name in commands
        }
        self.next_at = time.monotonic() + self.pause
        self.sent = 0
        self.held = b""
        self.rounds = 0

    def step(self) -> Output:
        take = self.todo[: min(self.chunk, self.params.max_tokens - self.sent)]
        del self.todo[: len(take)]
        ended = None
        if self.sent + len(take) >= self.params.max_tokens:
            ended = "length"
        elif not self.todo:
            take.append(END)
            ended = "stop" if self.sent + len(take) <= self.params.max_tokens else "length"
        first = self.sent == 0
        self.sent += len(take)
        self.rounds += 1
        data = self.held + bytes(i for i in take if i < 256)
        text = data.decode("utf-8", "ignore")
        self.held = data[len(text.encode()) :]
        top = self.params.logprobs
        logprobs = None if top is None else tuple(self.logprob(i, top) for i in take)
        prompt_logprobs = None
        if first and self.params.prompt_logprobs is not None:
            width = self.params.prompt_logprobs
            prompt_logprobs = (None, *(self.logprob(i, width) for i in self.prompt[1:]))
        sources: tuple[str, ...] = ()
        this_round, pieces = None, None
        if self.params.provenance:
            kept = 0 if first else len(take) - 1
            sources = ("block",) * kept + ("target",) * (len(take) - kept)
            this_round = None if first else ("block", 7, kept)
            pieces = ("",) * (len(take) - 1) + (text,)
        final = None
        if ended:
            final = {
                "prompt_tokens": len(self.prompt),
                "cached_tokens": 1,
                "completion_tokens": self.sent,
                "queue_seconds": 0.001,
                "prefill_seconds": 0.002,
                "decode_seconds": 0.003,
                "speculation": {"drafted": [0, 4, 4, 2], "accepted": [0, 4, 1, 0]},
            }
        return Output(
            self.id,
            text,
            tuple(take),
            sources,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=ended,
            final=final,
            round=this_round,
            pieces=pieces,
        )

    @staticmethod
    def logprob(token_id: int, top: int) -> TokenLogprob:
        others = [(i, -0.25 - 0.5 * rank) for rank, i in enumerate(range(97, 97 + top))]
        return TokenLogprob(token_id, -0.125, tuple(others))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record")
    parser.add_argument("start")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    sock = socket.socket(fileno=args.fd)
    decoder = FrameDecoder()
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def receive(wait: float) -> None:
        if select.select([sock], [], [], wait)[0]:
            data = sock.recv(1 << 20)
            if not data:
                sys.exit(0)
            with open(args.record, "a", encoding="utf-8") as file:
                for message in decoder.feed(data):
                    if message["type"] == "generate":
                        message["prompt_ids"] = unpack_ids(message["prompt_ids"]).tolist()
                    inbox.put(message)
                    file.write(json.dumps(message) + "\n")

    def send(message: dict[str, Any]) -> None:
        sock.sendall(encode_frame(message))

    while inbox.empty():
        receive(1.0)
    assert inbox.get()["type"] == "config"
    if args.start == "fatal":
        send({"type": "fatal", "error": "the drafter's hidden size 64 is not the target's 128"})
        sys.exit(1)
    if args.start == "exit":
        os._exit(3)
    while args.start == "never":
        receive(1.0)
    if args.start == "late":
        time.sleep(1.0)
    send({"type": "ready", "info": INFO})

    answers: dict[str, Answer] = {}
    generated = 0
    last = 0.0
    while True:
        due = min((answer.next_at for answer in answers.values()), default=time.monotonic() + STATS_SECONDS)
        receive(min(STATS_SECONDS, max(0.0, due - time.monotonic())))
        while not inbox.empty():
            message = inbox.get()
            if message["type"] == "shutdown":
                sys.exit(0)
            if message["type"] == "generate":
                answers[message["id"]] = Answer(message)
            if message["type"] == "cancel":
                answers.pop(message["id"], None)
        items = []
        for answer in [a for a in answers.values() if a.next_at <= time.monotonic()]:
            faults = {name for name, at in answer.faults.items() if answer.sent >= at}
            if "spin" in faults:
                del answer.faults["spin"]
                until = time.monotonic() + 2.5
                while time.monotonic() < until:
                    pass
            if "die" in faults:
                os.kill(os.getpid(), signal.SIGKILL)
            if "hang" in faults:
                answer.faults.clear()
                os.kill(os.getpid(), signal.SIGSTOP)
            if "garbage" in faults:
                sock.sendall(b"\xff\xff\xff\xff not a frame")
            if "error" in faults:
                items.append(Output(answer.id, finish_reason="error", error="logits are not finite"))
            else:
                items.append(answer.step())
                generated += len(items[-1].token_ids)
            answer.next_at = time.monotonic() + answer.pause
            if items[-1].finish_reason:
                del answers[answer.id]
        stats = EngineStats(
            running=len(answers),
            kv_pages_total=64,
            kv_pages_free=64 - len(answers),
            generation_tokens=generated,
            step_tokens=77,
            steps_by_tokens=(5, 1, 2, 1),
            drafts=3,
            draft_tokens=10,
            accepted_tokens=5,
            accepted_per_position=(2, 1, 1, 1),
            block_lengths={"0": 1, "4": 2},
        ).to_json()
        if items:
            send({"type": "outputs", "items": [item.to_json() for item in items], "stats": stats})
        elif time.monotonic() - last > STATS_SECONDS:
            send({"type": "stats", "stats": stats})
            last = time.monotonic()


if __name__ == "__main__":
    main()
