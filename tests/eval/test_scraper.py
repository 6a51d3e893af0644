from __future__ import annotations

import asyncio

import pytest

from eval.beside import Beside
from eval.metrics import Scraper


async def cancelled_in_the_last_scrape() -> bool:
    """A point that is cancelled, as Ctrl-C cancels it, while the page that ends it is on its way."""
    scrapes = 0
    last = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal scrapes
        while await reader.readuntil(b"\r\n\r\n"):
            scrapes += 1
            if scrapes > 1:
                last.set()
                await asyncio.sleep(60)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def point() -> None:
        async with Scraper(url, every=60):
            pass

    task = asyncio.create_task(point())
    await last.wait()
    task.cancel()
    await asyncio.wait([task])
    server.close()
    return task.cancelled()


def test_an_interrupt_during_the_last_scrape_of_a_point_ends_the_sweep() -> None:
    assert asyncio.run(cancelled_in_the_last_scrape())


class Slow(Beside):
    """Work that takes a while to stop."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    async def _run(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.stopping.set()
            await asyncio.sleep(0.05)


class Broken(Beside):
    async def _run(self) -> None:
        raise OSError("the page is gone")


async def cancelled_while_stopping() -> bool:
    slow = Slow()

    async def block() -> None:
        async with slow:
            await asyncio.sleep(0)

    task = asyncio.create_task(block())
    await slow.stopping.wait()
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


def test_an_interrupt_while_work_beside_a_block_stops_is_not_lost() -> None:
    assert asyncio.run(cancelled_while_stopping())


def test_a_fault_of_work_beside_a_block_is_raised_at_its_end() -> None:
    async def block() -> None:
        async with Broken():
            await asyncio.sleep(0.01)

    with pytest.raises(OSError, match="the page is gone"):
        asyncio.run(block())
