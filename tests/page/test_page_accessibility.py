"""Keyboard, names, contrast and small screens, computed in the browser in both colour schemes."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.page.browser import PageInBrowser
from tests.page.conftest import Opener
from tests.serve.api.live_server import LiveServer

pytestmark = pytest.mark.browser

RICH = "# A\n\ntext `code` [link](https://ok.example/)\n\n> quote\n\n- item\n\n```\npre\n```"
# WCAG contrast of every piece of visible text against what is painted behind it.
CONTRAST = """
const parse = (color) => {
  const numbers = color.match(/[\\d.]+/g).map(Number);
  return [...numbers.slice(0, 3), numbers[3] ?? 1];
};
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * linear(color[i] / 255), 0);
const behind = (node) => {
  const stack = [];
  for (let at = node; at; at = at.parentElement) stack.push(parse(getComputedStyle(at).backgroundColor));
  return stack.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text; (text = walker.nextNode()); ) {
  const node = text.parentElement;
  const decoration = node.closest("script, style, [aria-hidden=true], :disabled, .hidden");
  if (!text.data.trim() || decoration || !node.checkVisibility({ visibilityProperty: true })) continue;
  const style = getComputedStyle(node);
  const ground = behind(node);
  const ink = over(parse(node.closest("svg") ? style.fill : style.color), ground);
  const [high, low] = [luminance(ink), luminance(ground)].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  found.push([text.data.trim().slice(0, 30), (high + 0.05) / (low + 0.05), large ? 3 : 4.5]);
}
return found;
"""


def names(page: PageInBrowser) -> list[tuple[str, str]]:
    """(role, accessible name) of what can be operated, as assistive technology gets them."""
    nodes: list[dict[str, Any]] = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    wanted = {"button", "textbox", "spinbutton", "link", "DisclosureTriangle", "log", "image", "alert", "status"}
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in wanted
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(scripted: LiveServer, open_page: Opener, scheme: str) -> None:
    page = open_page(scripted.base)
    page.color_scheme(scheme)
    page.until(lambda: page.text("#facts"), "no facts")
    checked = page.run(CONTRAST)
    page.one("#settings summary").click()
    page.run("document.getElementById('max-tokens').value = '200'")
    page.ask_raw(f"!say:{RICH}! !chunk:6!")
    page.one(".answer .body").click()
    checked += page.run(CONTRAST)
    page.run("document.getElementById('max-tokens').value = '1000'")
    page.ask_raw("!say:x!")
    page.run("document.getElementById('key-dialog').showModal()")
    checked += page.run(CONTRAST)
    assert len(checked) > 100
    assert [entry for entry in checked if entry[1] < entry[2]] == []
    page.collect()
    page.complaints.clear()  # the refused request


def test_what_can_be_operated_has_a_name(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.one("#settings summary").click()
    page.ask("!say:hello!")
    found = names(page)
    assert {
        "Message",
        "System prompt",
        "Temperature",
        "Most tokens",
        "Send",
        "Compare speed",
        "Tokens",
        "New chat",
    } <= {name for _, name in found}
    assert [
        role for role, name in found if not name and role in ("button", "textbox", "spinbutton", "link", "image")
    ] == []
    assert page.run("return document.documentElement.lang") == "en"
    assert page.run("return document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0


def test_the_tab_key_goes_through_the_page_in_its_order(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.ask("!say:hello!")
    page.until(lambda: page.status == "ready", "not ready")
    page.run("document.activeElement.blur(); document.querySelector('.skip').focus()")
    seen = []
    for _ in range(7):
        seen.append(page.run("const a = document.activeElement; return a.id || a.className || a.textContent"))
        page.press(Keys.TAB)
    assert seen == ["skip", "new", "body", "quiet", "Settings", "prompt", "compare"]
    assert page.run("return document.activeElement.id") == "send"
    page.run("document.querySelector('.skip').focus()")
    page.press(Keys.ENTER)
    assert page.run("return document.activeElement.id") == "prompt"


def test_rounds_can_be_walked_by_pointer_and_by_keyboard(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.ask("!say:abcdefgh! !chunk:4!")
    body = page.one(".answer .body")
    body.send_keys(Keys.ARROW_RIGHT)
    assert page.text("#tip") == "From the prompt pass: the target’s own"
    body.send_keys(Keys.ARROW_RIGHT)
    assert page.text("#tip") == "Round 1: block drafter drafted 7, kept 4"
    assert page.text("#say").startswith(page.text("#tip"))
    marked = "return [...document.querySelectorAll('.t.on')].map((t) => t.dataset.r)"
    assert set(page.run(marked)) == {"1"}
    body.send_keys(Keys.ESCAPE)
    assert not page.one("#tip").is_displayed()
    assert page.run(marked) == []
    page.run("document.querySelector('.body .t').dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))")
    assert page.one("#tip").is_displayed()
    assert set(page.run(marked)) == {"0"}


def test_a_phone_has_it_all_without_scrolling_sideways(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.screen(390, 844, mobile=True)
    page.load()
    page.run("document.getElementById('max-tokens').value = '200'")
    page.ask_raw(f"!say:{RICH} {'x' * 90}!")
    assert page.run("return document.documentElement.scrollWidth") == 390
    assert page.one("#tile-rate").is_displayed()
    assert not page.one("#chart").is_displayed()
    page.run("scrollTo(0, 0)")
    page.one("#more summary").click()
    assert page.one("#chart").is_displayed()
    # What a thumb must hit is large enough (WCAG 2.5.8: 24 pixels).
    boxes = [node.rect for node in page.all("button, input, textarea") if node.is_displayed()]
    assert len(boxes) >= 4
    assert min(min(box["width"], box["height"]) for box in boxes) >= 24
