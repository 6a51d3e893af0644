"""Pictures of the page for the documentation: python -m tests.page.screenshots URL [FOLDER]

The server at URL should have a drafter and nothing else to do; fonts are those of the machine. It writes
page-light.png, page-dark.png and page-phone.png.
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium.webdriver import ActionChains

from tests.page.browser import PageInBrowser, start_chrome

CODE = "Write a Python function that checks whether a number is prime. Explain it in a short list."
COPY = "Repeat this list three times, nothing else: red, green, blue, yellow, violet, red, green, blue, yellow, violet."
RIVERS = "Name three rivers in Europe and say one thing about each."


def save(page: PageInBrowser, path: Path) -> None:
    """The visible part, in at most 256 colours: a quarter of the bytes."""
    shot = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size, "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        driver = start_chrome(Path(profile))
        try:
            page = PageInBrowser(driver, arguments.url.rstrip("/"))
            page.screen(1280, 860, scale=2)
            driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            page.until(lambda: page.text("#facts"), "the server is not ready")
            page.ask(CODE)
            marked = page.all(".body p .t[data-s=block]")
            if marked:
                ActionChains(driver).move_to_element(marked[min(3, len(marked) - 1)]).perform()
                page.until(lambda: page.all(".body p .t.on"), "the pointer marks no round")
            save(page, arguments.folder / "page-light.png")
            page.color_scheme("dark")
            page.one("#new").click()
            page.one("#prompt").send_keys(COPY)
            page.one("#compare").click()
            page.until(lambda: page.all(".result p"), "the comparison did not end")
            time.sleep(1.2)
            save(page, arguments.folder / "page-dark.png")
            page.color_scheme("light")
            page.screen(390, 844, mobile=True, scale=2)
            page.load()
            page.ask(RIVERS)
            page.run("scrollTo(0, 0)")
            save(page, arguments.folder / "page-phone.png")
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
