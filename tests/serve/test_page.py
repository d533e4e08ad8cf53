"""The chat page, as far as it shows without a browser; `make page-check` uses it in one."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("ostinato.serve.server")

from ostinato.serve import app
from ostinato.serve.server import Server
from tests.serve.serving import call, opened, running

TEXT = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with opened(tiny_model) as generator, running(generator, keys=("key",)) as started:
        yield started


class Found(HTMLParser):
    """The elements of a page, and the text inside its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in self.inside and self.cdata_elem:
            self.inside[self.elements[-1][0]].append(data)


@pytest.fixture(scope="module")
def found() -> Found:
    parser = Found()
    parser.feed(TEXT)
    parser.close()
    return parser


def test_the_page_needs_no_key_and_is_counted(server: Server) -> None:
    """It holds nothing secret, and asks for a key itself."""
    name = 'ostinato_http_requests_total{path="/",status="200"}'
    for method in ("GET", "HEAD"):
        reply = call(server, method, "/")
        assert reply.status == 200
        assert reply.body.decode() == (TEXT if method == "GET" else "")
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cache-control"] == "no-store"
    metrics = call(server, "GET", "/metrics", **{"x-api-key": "key"}).body.decode()
    assert f"{name} 2.0\n" in metrics
    assert call(server, "POST", "/", {}).status == 405
    assert call(server, "GET", "/favicon.ico").status == 404


def test_the_policy_allows_what_the_page_has_and_nothing_else(server: Server, found: Found) -> None:
    policy = dict(
        part.split(" ", 1)
        for part in call(server, "GET", "/").headers["content-security-policy"].split("; ")
    )
    for name in ("script", "style"):
        (text,) = found.inside[name]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{name}-src") == f"'sha256-{digest}'"
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        "connect-src": "'self'",
        "img-src": "data:",
    }
    for tag, attributes in found.elements:  # the policy would block these
        assert not any(name == "style" or name.startswith("on") for name in attributes), tag


def test_the_page_has_no_external_resource_and_writes_no_markup(found: Found) -> None:
    links = [
        value
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "srcset", "formaction")
    ]
    assert links == ["data:,"]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", TEXT)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function", TEXT)
    assert re.findall(r"call\(\"([^\"]+)\"", TEXT) == ["v1/models", "v1/chat/completions"]
    assert TEXT.count("fetch(") == 1


def test_each_field_and_button_has_a_name(found: Found) -> None:
    fields = [attributes for tag, attributes in found.elements if tag in ("input", "textarea")]
    assert len(fields) == sum(tag == "label" for tag, _ in found.elements) == 5
