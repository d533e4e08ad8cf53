"""Checks the documentation site in a headless browser.

    make site-check                             checks; pictures under build/site-check
    python -m tools.site_check SITE PICTURES    the same for a site that is built already

Each page of `PAGES` is opened in light and dark at the width of a desktop, and at the width of a
phone.  The page must not be wider than the window, and each of its pictures must load.  Each word
of `SEARCHES` is typed into the site's search, whose first result must be one of the word's pages.
The exit status is 0 if all checks pass.

The tool needs Playwright, which `make site-check` installs, and Chromium or Chrome on the path
(`apt-get install chromium` on Debian).  Therefore continuous integration does not run it.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGES = {
    "front": "",
    "tutorial": "tutorial/",
    "how-to": "howto/padding/",
    "reference": "reference/graphs/",
    "errors": "errors/",
}
LOOKS = {
    "light": (1280, 900, "light"),
    "dark": (1280, 900, "dark"),
    "phone": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
SEARCHES = {
    "rebind": "reference/graphs/",
    "cubin": "reference/kernels/ howto/kernels/",
    "float64": "signatures/",
    "padding": "reference/steps/ howto/padding/",
    "patch": "howto/values/",
    "quarantine": "reference/steps/",
    "eviction": "reference/cache/",
    "capture": "howto/captures/",
    "GraphedStep": "reference/steps/",
    "launch": "reference/kernels/ howto/kernels/",
    "CaptureBrokenError": "reference/exceptions/",
    "901": "howto/captures/ errors/",
    "WHILE": "reference/graphs/ howto/conditionals/",
    "torch.compile": "torch/",
    "transformers": "transformers/",
    "llama.cpp": "models/",
    "openai": "serve/",
    "doctor": "cli/",
    "NCCL": "scale/",
    "DLPack": "howto/libraries/",
    "join": "reference/relational/ relational/",
    "get_or_compile": "reference/kernels/",
}
"""Search words, and for each the pages of which one must be the first result."""

LONGEST = 3000
"""The greatest height of a page's picture, in pixels."""
_DARK = "document.body.dataset.mdColorScheme == 'slate'"
_WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
_MISSING = """[...document.images].filter(one => !one.complete || !one.naturalWidth)
    .map(one => one.getAttribute("src"))"""
_FOUND = """[...document.querySelectorAll(".md-search-result__list > li")].map(
    one => new URL(one.querySelector("a").href).pathname)"""


def browser_program() -> str:
    """Returns the path of the browser.  Raises SystemExit if there is none."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(
            f"no browser: none of {', '.join(BROWSERS)} is on the path.  On Debian and Ubuntu: "
            "apt-get install chromium"
        )
    return program


def reader(browser: Browser, look: str) -> Page:
    """Opens a window without stored state of the site."""
    width, height, scheme = LOOKS[look]
    size = {"width": width, "height": height}
    return browser.new_page(viewport=size, color_scheme=scheme, is_mobile=width < 600)


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site from this process until the end of the block; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def check_pages(browser: Browser, address: str, pictures: Path) -> Iterator[str]:
    for look, (_, _, scheme) in LOOKS.items():
        window = reader(browser, look)
        for name, page in PAGES.items():
            window.goto(address + page)
            path, (whole, width) = pictures / f"{name}-{look}.png", window.evaluate(_WIDTHS)
            height = min(window.evaluate("document.documentElement.scrollHeight"), LONGEST)
            clip = {"x": 0, "y": 0, "width": whole, "height": height}
            window.screenshot(path=path, full_page=True, clip=clip)
            if window.evaluate(_DARK) != (scheme == "dark"):
                yield f"{page or 'front'} ({look}): not in the reader's scheme"
            if whole > width:
                yield f"{page or 'front'} ({look}): {whole} pixels wide in a window of {width}"
            for picture in window.evaluate(_MISSING):
                yield f"{page or 'front'} ({look}): no picture {picture}"


def check_search(browser: Browser, address: str) -> Iterator[str]:
    window = reader(browser, "light")
    for word, pages in SEARCHES.items():
        window.goto(f"{address}?q={word}")
        window.wait_for_function(f"{_FOUND}.length")
        found = [path.lstrip("/") for path in window.evaluate(_FOUND)]
        if found[0] not in pages.split():
            yield f"search for {word}: first {', '.join(found[:3])}, not {pages}"


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    site, pictures = map(Path, sys.argv[1:])
    program = browser_program()
    if not (site / "index.html").exists():
        raise SystemExit(f"{site}: no site is built there; make site builds it")
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, served(site) as address:
        browser = playwright.chromium.launch(executable_path=program)
        faults = [*check_pages(browser, address, pictures), *check_search(browser, address)]
        browser.close()
    print(
        "\n".join(faults)
        or f"sound: {len(PAGES)} pages in {len(LOOKS)} looks, "
        f"{len(SEARCHES)} searches; pictures in {pictures}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
