"""One structured line for each request that reached the engine: sizes, times, acceptance and how it ended; no text.

A record is filled while the request runs and logged when its response is over. It does not know HTTP.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from serve.protocol import Output

log = logging.getLogger("serve.requests")


@dataclass
class RequestRecord:
    """What is known of one request. ``arrival`` is a ``time.monotonic()``; counts are sums over the choices, those
    of prompts over the prompts.

    first_token, last_token: seconds after arrival, None until there is one.
    """

    id: str
    arrival: float
    stream: bool
    choices: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    drafted: int = 0
    accepted: int = 0
    draft_rounds: int = 0
    finish_reasons: list[str] = field(default_factory=list)

    def take(self, output: Output, *, of_first_choice: bool) -> None:
        """Add what one choice gained. A prompt counts once, and so does what of it was cached: for its first choice."""
        if output.token_ids:
            self.last_token = time.monotonic() - self.arrival
            if self.first_token is None:
                self.first_token = self.last_token
            self.completion_tokens += len(output.token_ids)
        if output.finish_reason is None:
            return
        self.finish_reasons.append(output.finish_reason)
        final = output.final or {}
        if of_first_choice:
            self.cached_tokens += int(final.get("cached_tokens", 0))
        self.queue_seconds = max(self.queue_seconds, float(final.get("queue_seconds", 0.0)))
        self.prefill_seconds = max(self.prefill_seconds, float(final.get("prefill_seconds", 0.0)))
        rounds = final.get("speculation") or {}
        for drafted, accepted in zip(rounds.get("drafted", ()), rounds.get("accepted", ()), strict=True):
            if drafted:
                self.draft_rounds += 1
                self.drafted += drafted
                self.accepted += accepted

    def fields(self) -> dict[str, Any]:
        """The line's members. ``acceptance_length``: tokens a drafted round kept, the target's own included."""
        decode = None if self.first_token is None or self.last_token is None else self.last_token - self.first_token
        return {
            "id": self.id,
            "stream": self.stream,
            "choices": self.choices,
            "finish_reason": ",".join(self.finish_reasons) or "cancelled",
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "acceptance_length": 1 + self.accepted / self.draft_rounds if self.draft_rounds else None,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "queue_seconds": _rounded(self.queue_seconds),
            "prefill_seconds": _rounded(self.prefill_seconds),
            "ttft_seconds": _rounded(self.first_token),
            "decode_seconds": _rounded(decode),
            "total_seconds": _rounded(time.monotonic() - self.arrival),
        }


def log_request(record: RequestRecord, request_id: str, route: str, status: int) -> None:
    """Write the line. ``request_id``: the id of the HTTP request; the record's own is that of the reply."""
    fields = {"request_id": request_id, "route": route, "status": status, **record.fields()}
    log.info("request", extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
