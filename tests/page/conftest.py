"""One Chromium for all tests, servers to look at, and a check after every test that the browser had no complaint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.conftest import ROOT
from tests.e2e.real_server import RealServer
from tests.page.browser import PageInBrowser, start_chrome
from tests.serve.api.live_server import LiveServer

Opener = Callable[[str], PageInBrowser]
KEY = "a-key-of-the-test"


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    driver = start_chrome(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="session")
def model_server(default_model_dir: Path, trace_dir: Path) -> Iterator[RealServer]:
    """The default model with its drafter; every round has a draft, whatever the controller would think of it."""
    drafter = ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"
    arguments = ("--drafter-dir", str(drafter), "--block-length", "5", "--trace-dir", str(trace_dir))
    with RealServer(default_model_dir, *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The real API before an engine that answers what the prompt tells it to."""
    with LiveServer(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One that wants ``KEY``."""
    with LiveServer(tmp_path_factory.mktemp("keyed"), environ={"FORETOKEN_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def open_page(chrome: Chrome) -> Iterator[Opener]:
    """Opens the page of a server. Afterwards: no request left its origin, and the console stayed empty unless the test
    expects complaints of its own and has cleared them."""
    opened: list[PageInBrowser] = []

    def open_one(base: str) -> PageInBrowser:
        chrome.get("data:,")
        for kind in ("browser", "performance"):
            chrome.get_log(kind)  # type: ignore[no-untyped-call]  # forget what went before
        opened.append(PageInBrowser(chrome, base))
        return opened[-1]

    yield open_one
    for page in opened:
        page.leave()
        page.collect()
        foreign = [url for url in page.requests if not url.startswith((page.base + "/", "data:"))]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert foreign == []
        assert page.complaints == []
