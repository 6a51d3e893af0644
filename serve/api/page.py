"""GET /: one self-contained page that chats with this server and shows what speculation does (sources in ``page/``).

Style and scripts are put into the page when the server starts. The content security policy names the hashes of just
these two, allows connections to this origin only, and forbids every way to turn text into markup. The page uses the
public API and nothing else; it is open, the key is asked for by the page itself. It does not know what the API answers.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

SOURCES = Path(__file__).with_name("page")
SCRIPTS = ("dom", "answer", "markdown", "render", "rounds", "api", "metrics", "chat", "main")
"""In the order in which they are joined: one module, one scope."""


@dataclass(frozen=True)
class Page:
    """The assembled page and the headers it must be sent with."""

    body: bytes
    headers: dict[str, str]


def assemble(needs_key: bool) -> Page:
    """The page as one document. ``needs_key``: it asks for the API key before its first request."""
    style = (SOURCES / "style.css").read_text(encoding="utf-8")
    script = "\n".join((SOURCES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    document = (SOURCES / "index.html").read_text(encoding="utf-8")
    for mark, content in (
        ("/*style*/", style),
        ("/*script*/", script),
        ('data-needs-key="false"', f'data-needs-key="{str(needs_key).lower()}"'),
    ):
        if document.count(mark) != 1 or "</style" in style or "</script" in script:
            raise ValueError(f"the page's sources cannot be put together at {mark}")
        document = document.replace(mark, content)
    policy = (
        "default-src 'none'; "
        f"style-src {_source(style)}; script-src {_source(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return Page(
        document.encode("utf-8"),
        {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )


def _source(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def page_router(needs_key: bool) -> APIRouter:
    """The route of the page, assembled once."""
    router = APIRouter()
    page = assemble(needs_key)

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return Response(page.body, headers=page.headers)

    return router
