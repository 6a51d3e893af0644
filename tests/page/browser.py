"""A real headless Chromium on the server's page: what a reader does and sees, and what the browser complains of."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,860",
)


def start_chrome(profile: Path) -> Chrome:
    """Chromium with an empty profile; console and network are recorded."""
    paths = shutil.which("chromium"), shutil.which("chromedriver")
    assert all(paths), "chromium and chromedriver are missing: sh scripts/test.sh installs them; or -m 'not browser'"
    options = ChromeOptions()
    options.binary_location = str(paths[0])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options=options, service=Service(str(paths[1])))


class PageInBrowser:
    """The page of the server at ``base``, freshly loaded."""

    def __init__(self, driver: Chrome, base: str) -> None:
        self.driver = driver
        self.base = base
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.load()

    def load(self) -> None:
        self.driver.get(self.base + "/")

    def leave(self) -> None:
        """Go elsewhere, so that nothing asks the server any more."""
        self.driver.get("data:,")

    # -- what a reader does --------------------------------------------------------------------------------------------

    def ask(self, text: str, wait: bool = True) -> None:
        """Type and send; wait for the end of the answer."""
        self.one("#prompt").send_keys(text + Keys.ENTER)
        if wait:
            self.until(lambda: not self.busy, "the answer did not end")

    def ask_raw(self, text: str) -> None:
        """As if pasted and sent: any characters, line breaks included."""
        self.run(
            "document.getElementById('prompt').value = arguments[0];"
            "document.getElementById('composer').requestSubmit()",
            text,
        )
        self.until(lambda: not self.busy, "the answer did not end")

    def press(self, key: str) -> None:
        self.driver.switch_to.active_element.send_keys(key)

    def color_scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screen(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    # -- what a reader sees --------------------------------------------------------------------------------------------

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """All text of the last match, as the document has it."""
        return str(self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''", selector))

    @property
    def busy(self) -> bool:
        return self.text("#send") == "Stop"

    @property
    def status(self) -> str:
        return self.text("#status-text")

    def until(self, condition: Callable[[], Any], told: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{told}; status {self.status!r}, banner {self.text('#banner-text')!r}"
            time.sleep(0.03)

    def seen_until(self, read: Callable[[], T], done: Callable[[], Any], told: str) -> set[T]:
        """Every value that ``read`` had until ``done``."""
        seen: set[T] = set()

        def look() -> Any:
            seen.add(read())
            return done()

        self.until(look, told)
        return seen

    # -- what the browser noticed --------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Reads the browser's records since the last call."""
        self.complaints += [
            str(entry["message"])
            for entry in self.driver.get_log("browser")  # type: ignore[no-untyped-call]
            if entry["level"] in ("SEVERE", "WARNING")
        ]
        for entry in self.driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
