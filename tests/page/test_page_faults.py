"""When the engine dies, the server goes and comes back, or wants a key: the page says so and goes on by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.page.browser import PageInBrowser
from tests.page.conftest import KEY, Opener
from tests.serve.api.live_server import LiveServer, eventually

pytestmark = pytest.mark.browser

SLOW = f"!say:{'word ' * 20}! !slow:0.05!"


def expect_only(page: PageInBrowser, *words: str) -> None:
    """The browser's own lines about failed loads, each with one of ``words``; nothing else."""
    page.collect()
    assert page.complaints
    assert all(any(word in line for word in words) for line in page.complaints), page.complaints
    page.complaints.clear()


def test_a_dead_engine_is_shown_and_the_page_reconnects_to_the_next_server(tmp_path: Path, open_page: Opener) -> None:
    (tmp_path / "second").mkdir()
    with LiveServer(tmp_path) as live:
        port = live.base.rsplit(":", 1)[1]
        page = open_page(live.base)
        page.until(lambda: page.status == "ready", "not ready")
        page.run("document.getElementById('max-tokens').value = '60'")
        page.ask(SLOW, wait=False)
        page.until(lambda: len(page.text(".answer .body")) > 6, "no text")
        os.kill(live.engine_pid(), signal.SIGKILL)
        page.until(lambda: not page.busy, "the answer did not end")
        assert page.one(".answer .failed").get_attribute("role") == "alert"
        assert "engine has failed" in page.text(".answer .failed")
        assert page.text(".answer .body").startswith("word w")
        page.until(lambda: page.status == "not answering", "the page did not notice")
        assert page.one("#banner").is_displayed()
        assert "engine has failed" in page.text("#banner-text")
    page.until(lambda: page.status == "offline", "the page did not notice")
    assert "No connection to the server. Next try in 1 second." in page.text("#banner-text")
    page.until(lambda: "in 2 seconds" in page.text("#banner-text"), "it does not back off")
    with LiveServer(tmp_path / "second", "--port", port):
        page.until(lambda: page.status == "ready", "the page did not reconnect")
        assert not page.one("#banner").is_displayed()
        page.one(".again").click()
        page.until(lambda: not page.busy and page.text(".answer .body") == "word " * 12, "no answer after a second try")
        page.leave()
        expect_only(
            page, "503", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET"
        )


def test_a_key_is_asked_for_checked_and_kept_in_memory_only(keyed: LiveServer, open_page: Opener) -> None:
    page = open_page(keyed.base)
    page.until(lambda: page.one("#key-dialog").is_displayed(), "no dialog")
    assert page.status == "key needed"
    assert page.run("return document.activeElement.id") == "key"
    page.collect()
    assert page.complaints == []  # nothing was tried without a key
    page.one("#key").send_keys("a-wrong-key\n")
    page.until(lambda: page.text("#key-error") == "That key was refused.", "a wrong key was taken")
    expect_only(page, "401")
    page.one("#key").send_keys(KEY + "\n")
    page.until(lambda: page.status == "ready", "the key was not taken")
    assert not page.one("#key-dialog").is_displayed()
    page.ask("!say:hello!")
    assert page.text(".answer .body") == "hello"
    stores = "return [localStorage.length, sessionStorage.length, document.cookie, location.search]"
    assert page.run(stores) == [0, 0, "", ""]
    assert KEY not in page.run("return document.documentElement.outerHTML")
    assert page.run("return document.getElementById('key').value") == ""
    page.load()
    page.until(lambda: page.one("#key-dialog").is_displayed(), "the key outlived the page")


def test_a_server_that_loads_is_said_to_load(tmp_path: Path, open_page: Opener) -> None:
    with LiveServer(tmp_path, start="never", wait_ready=False) as live:
        eventually(lambda: any("http://" in line for line in live.errors), 60)
        live.base = next(line for line in live.errors if "http://" in line).strip().rsplit(" ", 1)[1]
        page = open_page(live.base)
        page.until(lambda: page.status == "loading", "it does not say so")
        assert page.text("#banner-text") == "The server cannot answer now: the model is loading"
        page.leave()
        expect_only(page, "503")
