"""The chat page at "/": one file without external resources, and the headers that restrict it.

The content security policy names the hashes of the page's own style and script, so nothing else of
the page runs, whatever a model writes; the page can send requests to this server only.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.responses import Response


def page_response() -> Response:
    """Returns a response with the page and its headers."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html")


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'",
        *(f"{name}-src {_hash(text, name)}" for name in ("script", "style")),
        "connect-src 'self'",
        "img-src data:",  # its empty icon, without which browsers request /favicon.ico
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return text, headers


def _hash(text: str, name: str) -> str:
    """Returns the source expression for the one element of this name in the page."""
    (inside,) = re.findall(rf"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
