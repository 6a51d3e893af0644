"""The page as a document, without a browser: one response, small, closed to everything foreign, and removable."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import httpx

from serve.api.page import SCRIPTS, SOURCES
from tests.page.conftest import KEY
from tests.serve.api.live_server import LiveServer

LIMIT_BYTES = 100_000


def test_one_small_response_with_everything_in_it(scripted: LiveServer) -> None:
    with scripted.client() as http:
        response = http.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert len(response.content) < LIMIT_BYTES
        head = http.head("/")
        assert (head.status_code, head.content) == (200, b"")
    # No address of anything to load: what remains are the SVG namespace and the scheme tests of the link check.
    addresses = set(re.findall(r"""(?:src|href)=["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", response.text))
    assert {a for pair in addresses for a in pair if a} <= {"#prompt", "data:image/svg+xml,%3Csvg"}
    assert set(re.findall(r"https?://[\w.]+", response.text)) == {"http://www.w3.org"}


def test_every_source_file_is_part_of_it() -> None:
    assert {path.name for path in SOURCES.iterdir()} == {"index.html", "style.css", *(f"{name}.js" for name in SCRIPTS)}


def test_the_policy_names_exactly_the_inline_style_and_script(scripted: LiveServer) -> None:
    response = httpx.get(scripted.base + "/", trust_env=False)
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";") if part.strip()
    )
    for directive, tag in (("style-src", "style"), ("script-src", "script")):
        (content,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_nothing_in_the_scripts_makes_markup_of_text() -> None:
    for name in SCRIPTS:
        script = (SOURCES / f"{name}.js").read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|DOMParser", script)
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", script)


def test_no_page_removes_the_route_and_nothing_else(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--no-page") as live, live.client() as http:
        assert http.get("/").status_code == 404
        assert http.get("/health").status_code == 200


def test_with_keys_the_page_is_open_and_says_that_a_key_is_needed(keyed: LiveServer, scripted: LiveServer) -> None:
    with keyed.client() as http:
        page = http.get("/")
        assert page.status_code == 200
        assert 'data-needs-key="true"' in page.text
        assert KEY not in page.text
        assert http.get("/metrics").status_code == 401
    assert 'data-needs-key="false"' in httpx.get(scripted.base + "/", trust_env=False).text
