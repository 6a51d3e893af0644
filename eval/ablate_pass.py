"""One measuring pass over one server: chats, copying, a long prompt twice, a chat that is interrupted, a burst.

Everything is asked for at full length, so that two servers do the same work. It knows no switches and starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from eval.client import ChatRequest, Measurement, TokenizerCounter, measure, open_client, send, served_model
from eval.load import run_burst, run_sequential
from eval.prompts import burst, copy_heavy, interactive, long_prompt
from eval.servers import ServerFailed


@dataclass(frozen=True)
class Sizes:
    """Of one measuring pass, in requests and tokens."""

    chats: int = 2
    chat_tokens: int = 96
    copies: int = 3
    long_tokens: int = 1024
    burst: int = 8
    burst_tokens: int = 48


SMALL = Sizes(chats=1, chat_tokens=32, copies=1, long_tokens=512, burst=4, burst_tokens=16)

# Seconds from a chat to the long prompt that is to interrupt it: shorter ones for servers that are done before.
_DELAYS = (0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Pass:
    """One server measured once. ``tau`` and ``drafted`` are tokens kept and tokens drafted a round, by measure."""

    values: dict[str, float]
    tau: dict[str, float]
    drafted: dict[str, float]


def measure_server(url: str, sizes: Sizes, counter: TokenizerCounter, seed: int) -> Pass:
    """All measures of one server. ServerFailed when a request fails or stays empty."""
    return asyncio.run(_measure(url, sizes, counter, seed))


async def _measure(url: str, sizes: Sizes, counter: TokenizerCounter, seed: int) -> Pass:
    options = (("ignore_eos", True),)

    def full(requests: list[ChatRequest]) -> list[ChatRequest]:
        return [ChatRequest(r.messages, r.max_tokens, options=options, category=r.category) for r in requests]

    async with open_client(url) as client:
        model = await served_model(client)
        chats = full(interactive(sizes.chats, seed, counter, max_tokens=sizes.chat_tokens))
        chat = _good([measure(r, counter) for r in await run_sequential(client, model, chats)])
        copies = full(copy_heavy(sizes.copies, seed, max_tokens=sizes.chat_tokens))
        copied = _good([measure(r, counter) for r in await run_sequential(client, model, copies)])
        # Sent twice: the second finds the first one's pages.
        (document,) = full(long_prompt(1, seed, counter, sizes.long_tokens, max_tokens=2))
        first, again = _good([measure(r, counter) for r in await run_sequential(client, model, [document] * 2)])
        stall = await _stall(client, model, sizes, counter, seed)
        crowd = full(burst(sizes.burst, seed, counter, tokens=120, max_tokens=sizes.burst_tokens))
        crowded = _good([measure(r, counter) for r in await run_burst(client, model, crowd)])
    wall = max(item.finished_at for item in crowded) - min(item.sent_at for item in crowded)
    groups = {"chat": chat, "copy": copied, "burst": crowded}
    return Pass(
        values={
            "chat": _tpot(chat),
            "copy": _tpot(copied),
            "long": first.ttft or 0.0,
            "again": again.ttft or 0.0,
            "stall": stall,
            "burst": sum(item.tokens for item in crowded) / wall,
        },
        tau={name: _rounds(items)[0] for name, items in groups.items()},
        drafted={name: _rounds(items)[1] for name, items in groups.items()},
    )


async def _stall(client: httpx.AsyncClient, model: str, sizes: Sizes, counter: TokenizerCounter, seed: int) -> float:
    """Seconds: the longest gap between chunks of a chat during which a long prompt arrives. ServerFailed where every
    chat is over before that."""
    for attempt, delay in enumerate(_DELAYS, start=1):
        own = -seed - 10_000 * attempt
        (chat,) = interactive(1, own, counter, max_tokens=max(96, 2 * sizes.chat_tokens))
        (document,) = long_prompt(1, own, counter, sizes.long_tokens, max_tokens=2)
        running = asyncio.create_task(
            send(client, model, ChatRequest(chat.messages, chat.max_tokens, options=(("ignore_eos", True),)))
        )
        await asyncio.sleep(delay)
        late = await send(client, model, document)
        streamed, interruption = _good([measure(await running, counter), measure(late, counter)])
        if interruption.sent_at < streamed.finished_at:
            return max(streamed.icl)
    raise ServerFailed("every chat was over before the long prompt arrived; give a larger --chat-tokens")


def _good(items: list[Measurement]) -> list[Measurement]:
    for item in items:
        if item.outcome != "ok":
            raise ServerFailed(f"a request ended as {item.outcome}: {item.error}")
    return items


def _tpot(items: Sequence[Measurement]) -> float:
    """Seconds a token over all requests together."""
    timed = [item for item in items if item.tpot is not None]
    return sum((item.tpot or 0.0) * (item.tokens - 1) for item in timed) / sum(item.tokens - 1 for item in timed)


def _rounds(items: Sequence[Measurement]) -> tuple[float, float]:
    """Tokens kept and tokens drafted a round; rounds without a draft count as rounds."""
    tokens = sum(item.tokens for item in items)
    accepted = sum(item.speculation.get("num_accepted_draft_tokens", 0) for item in items)
    drafted = sum(item.speculation.get("num_draft_tokens", 0) for item in items)
    rounds = max(1, tokens - accepted)
    return tokens / rounds, drafted / rounds
