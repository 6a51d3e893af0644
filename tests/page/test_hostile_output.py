"""Whatever a model writes stays text: no script, no handler, no request, no link but http and https."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.page.browser import PageInBrowser
from tests.page.conftest import Opener
from tests.serve.api.live_server import LiveServer

pytestmark = pytest.mark.browser

ALLOWED = {
    *("A", "BLOCKQUOTE", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P", "PRE"),
    *("SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
}
LOOK = """
const body = [...document.querySelectorAll(".answer .body")].at(-1);
const all = [...body.querySelectorAll("*")];
const attributes = all.flatMap((node) => [...node.attributes]);
const own = body.cloneNode(true);
own.querySelectorAll(".code-head").forEach((node) => node.remove());
return {
  tags: [...new Set(all.map((node) => node.tagName))],
  handlers: attributes.map((attribute) => attribute.name).filter((name) => /^(on|style|src)/i.test(name)),
  links: all.filter((node) => node.tagName === "A").map((a) => [a.href, a.rel, a.target]),
  text: own.textContent,
  pwned: window.pwned ?? null,
};
"""
RUN = "window.pwned=1"
HOSTILE = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}><svg onload={RUN}><iframe srcdoc='<script>parent.{RUN}</script>'>",
    f"</script></style></textarea><script>{RUN}</script><base href=https://evil.example/>",
    f"```html\n<script>{RUN}</script>\n```\n\n    <body onload={RUN}>",
    f"[a](javascript:{RUN}) [b]( JaVaScRiPt:{RUN}) [c](data:text/html,<script>{RUN}</script>) [d](//evil.example/x)",
    f'[a](https://ok.example/"onmouseover="{RUN}) [b](https://ok.example/x "t" onclick={RUN})',
    f'<a href="javascript:{RUN}">c</a> <form action=javascript:{RUN}><input type=submit autofocus onfocus={RUN}>',
    "[a](https\tx:evil) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x) https://ok.example:99999/ [e](http://[)",
    "![p](https://evil.example/p.png)<!--<img src=http://evil.example/i>-->",
    "<link rel=stylesheet href=//evil.example/x> <meta http-equiv=refresh content=0><object data=//evil.example/o>",
    "&lt;script&gt; &#60;b&#62; \\<b> \u202eevil\u202c \u0000\u2028\u2029 \ufeff",
    "`" * 20 + "**" * 20 + "[" * 40 + "](" * 15 + "_" * 20,
    "| a | <b>b</b> |\n|---|---|\n| <i>1</i> | [x](javascript:1) |\n\n1. <u>one</u>\n   - <s>two</s>\n> <q>three</q>",
]


@pytest.fixture
def page(scripted: LiveServer, open_page: Opener) -> PageInBrowser:
    opened = open_page(scripted.base)
    opened.run("document.getElementById('max-tokens').value = '200'")  # the scripted engine has 512 tokens of context
    return opened


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


def check(seen: dict[str, Any], source: str) -> None:
    assert seen["pwned"] is None
    assert set(seen["tags"]) <= ALLOWED
    assert seen["handlers"] == []
    # Every character shown is the model's, in the model's order.
    assert is_subsequence(seen["text"], source)
    for href, rel, target in seen["links"]:
        assert href.startswith(("http://", "https://"))
        assert "noopener" in rel
        assert target == "_blank"


def test_hostile_answers_stay_text(page: PageInBrowser) -> None:
    for source in HOSTILE:
        page.ask_raw(f"!hex:{source.encode().hex()}! !chunk:7!" if "!" in source else f"!say:{source}! !chunk:7!")
        check(page.run(LOOK), source)
        page.one(".answer footer button").click()
        shown = page.run(LOOK)
        check({**shown, "text": ""}, source)
        assert shown["text"].replace("↵\n", "\n").replace("∅", "") == source
        page.one("#new").click()


def test_markdown_becomes_elements_and_links_are_safe(page: PageInBrowser) -> None:
    source = (
        '# Title\n\nA **bold**, *soft* `code`, [a link](https://ok.example/a(b)?c=1 "t") or http://ok.example/x.\n\n'
        "- one\n- two\n  1. inner\n\n```python\nprint('*no*')\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |"
    )
    page.ask_raw(f"!say:{source}! !chunk:5!")
    seen = page.run(LOOK)
    check(seen, source)
    tags = {"H3", "STRONG", "EM", "CODE", "A", "UL", "OL", "PRE", "TABLE"}
    assert tags <= set(seen["tags"])
    assert [href for href, _, _ in seen["links"]] == ["https://ok.example/a(b)?c=1", "http://ok.example/x"]
    assert page.text(".body pre") == "print('*no*')\n"
    assert page.text(".body ul ol li") == "inner"
    assert [cell.text for cell in page.all(".body td")] == ["1", "2"]


def test_any_mixture_of_marks_is_shown_in_order_and_whole(page: PageInBrowser) -> None:
    draw = random.Random(7)
    marks = [
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~",
        "~~~",
        "---",
        "# ",
        "- ",
        "1. ",
        "> ",
        "|",
        "|-|-|",
        "[",
        "](",
        ")",
        "\\",
    ]
    pieces = [*marks, "\n", "\n\n", "http://a.b", "<b>", "  ", "word ", "é龜🫠"]
    for _ in range(12):
        source = "".join(draw.choice(pieces) for _ in range(60)).strip() or "x"
        page.ask_raw(f"!say:{source}! !chunk:{draw.randint(1, 9)}!")
        check(page.run(LOOK), source)
        page.one(".answer footer button").click()
        assert page.run(LOOK)["text"].replace("↵\n", "\n").replace("∅", "") == source
        page.one("#new").click()


def test_the_browser_itself_refuses_markup_and_foreign_scripts(page: PageInBrowser) -> None:
    """The second wall: even a mistake in the page could not turn text into markup or load anything."""
    assert "TrustedHTML" in page.run(
        "try { document.body.innerHTML = '<b>x</b>'; return 'taken' } catch (error) { return error.message }"
    )
    page.run(
        "const s = document.createElement('script');"
        "try { s.textContent = 'window.pwned=1' } catch { s.append('window.pwned=1') } document.body.append(s);"
    )
    assert page.run("return window.pwned ?? null") is None
    page.collect()
    assert page.complaints  # violations of the policy are reported
    page.complaints.clear()
