"""Opens the documentation site in a headless browser and looks at what readers see.

    make site-check                             checks; pictures under build/site-check
    python -m tools.site_check SITE PICTURES    the same, of a site that is built already

Each page of `PAGES` is opened in light and dark at the width of a desk, and at the width of a
phone.  It must not be wider than the window, and each of its pictures must be there.  Each word of
`SEARCHES` is typed into the site's own search, whose first result must be the page beside it.  Exit
status 0 if all of it is so.

It needs Chromium or Chrome on the path, which no Python package brings: `apt-get install chromium`
on Debian.  So it is no part of continuous integration.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
"""What a reader types, and the pages of which one has to come first."""

WAIT = 30.0
"""Seconds for a page or an answer of the search: against hangs alone."""
LONGEST = 3000
_DARK = "document.body.dataset.mdColorScheme == 'slate'"
_SIZE = "[innerWidth, document.documentElement.scrollHeight]"
_WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
_MISSING = """[...document.images].filter(one => !one.complete || !one.naturalWidth)
    .map(one => one.getAttribute("src"))"""
_FOUND = """[...document.querySelectorAll(".md-search-result__list > li")].map(
    one => new URL(one.querySelector("a").href).pathname)"""


class Browser:
    """Chromium over its debugging pipe: one message of JSON each way, a zero byte after each."""

    def __init__(self, program: str, profile: str) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
        command += ["--disable-component-update", "--no-proxy-server", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # It reads file 3 and writes file 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._reading, self._writing = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._rest = b""
        self._number = 0
        self._session: dict[str, str] = {}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        self._writing.write(json.dumps(message).encode() + b"\0")
        self._writing.flush()
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._reading.fileno(), 1 << 16)
                if not more:
                    raise SystemExit(f"{method}: the browser has ended")
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            said = json.loads(text)
            if said.get("id") == self._number:
                if "error" in said:
                    raise SystemExit(f"{method}: {said['error']}")
                return said["result"]

    def evaluate(self, script: str) -> Any:
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in said:
            raise SystemExit(f"{script}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def until(self, script: str) -> Any:
        """The script's value, when it is true."""
        end = time.monotonic() + WAIT
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                raise SystemExit(f"not within {WAIT:.0f} s: {script}")
            time.sleep(0.05)
        return value

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until(f'location.href == "{address}" && document.readyState == "complete"')

    def look(self, width: int, height: int, scheme: str) -> None:
        """From here on as a new reader with such a window, of whom the site remembers nothing."""
        self._session = {}
        reader = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=reader)
        said = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": said["sessionId"]}
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Of the page, or of its first `LONGEST` pixels."""
        width, height = self.evaluate(_SIZE)
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, LONGEST), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._writing.close()
        self._reading.close()
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """The site's address, while it is served from this process."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def check_pages(browser: Browser, address: str, pictures: Path) -> Iterator[str]:
    for look, (width, height, scheme) in LOOKS.items():
        browser.look(width, height, scheme)
        for name, page in PAGES.items():
            browser.open(address + page)
            browser.picture(pictures / f"{name}-{look}.png")
            if browser.evaluate(_DARK) != (scheme == "dark"):
                yield f"{page or 'front'} ({look}): not in the reader's scheme"
            wide, window = browser.evaluate(_WIDTHS)
            if wide > window:
                yield f"{page or 'front'} ({look}): {wide} pixels wide in a window of {window}"
            for picture in browser.evaluate(_MISSING):
                yield f"{page or 'front'} ({look}): no picture {picture}"


def check_search(browser: Browser, address: str) -> Iterator[str]:
    browser.look(*LOOKS["light"])
    for word, pages in SEARCHES.items():
        browser.open(f"{address}?q={word}")
        found = [path.lstrip("/") for path in browser.until(f"{_FOUND}.length && {_FOUND}")]
        if found[0] not in pages.split():
            yield f"search for {word}: first {', '.join(found[:3])}, not {pages}"


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    site, pictures = map(Path, sys.argv[1:])
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(
            f"no browser: none of {', '.join(BROWSERS)} is on the path.  On Debian and Ubuntu: "
            "apt-get install chromium"
        )
    if not (site / "index.html").exists():
        raise SystemExit(f"{site}: no site is built there; make site builds it")
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, served(site) as address:
        browser = Browser(program, profile)
        try:
            faults = [
                *check_pages(browser, address, pictures),
                *check_search(browser, address),
            ]
        finally:
            browser.close()
    print(
        "\n".join(faults)
        or f"sound: {len(PAGES)} pages in {len(LOOKS)} looks, "
        f"{len(SEARCHES)} searches; pictures in {pictures}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
