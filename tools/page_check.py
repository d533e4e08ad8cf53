"""Checks the server's chat page in a headless browser.

    make page-check                         checks; pictures under build/page-check
    python -m tools.page_check PICTURES     the same with the Playwright of this environment

A server with a tiny model of random weights is used through its page: an answer must be the API's
own, an answer must end when it is stopped, a wrong key must be told, and markup of a model must be
shown as text.  Look at the pictures.  The exit status is 0 if all checks pass.

The tool needs Playwright and a browser, as `tools.site_check` does, and is not run by continuous
integration for the same reason.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from playwright.sync_api import Browser, Page, expect, sync_playwright

from ostinato import open_device
from ostinato.serve.server import Server
from tests.models.model_files import CONFIG, write_gguf
from tests.serve.serving import MODEL, call, open_generator, running
from tools.site_check import LOOKS, browser_program, reader

CHAT = "/v1/chat/completions"
CONTEXT = 4096
"""Tokens of the context: more than the checked conversations have."""
MARKUP = "<img src=x onerror='window.ran = 1'><script>window.ran = 2</script>\n  **as it is** &amp;"
_CAUSED = ("status of 400", "status of 401", "net::ERR_FAILED")
"""What the browser says of the failed requests that are caused here."""
_WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@contextlib.contextmanager
def served(model: Path, *keys: str) -> Iterator[Server]:
    with (
        open_device("host") as device,
        open_generator(device, model) as generator,
        running(generator, keys=keys) as server,
    ):
        yield server


def opened(browser: Browser, server: Server, complaints: list[str], look: str = "light") -> Page:
    """Opens the page; `complaints` gets its errors, and each line of its console but `_CAUSED`."""
    window = reader(browser, look)

    def note(text: str) -> None:
        if not any(words in text for words in _CAUSED):
            complaints.append(f"{look}: {text}")

    window.on("console", lambda one: note(one.text))
    window.on("pageerror", lambda error: note(str(error)))
    window.goto(server.url)
    return window


def settings(window: Page, temperature: str, max_tokens: str) -> None:
    window.get_by_text("Settings").click()
    window.get_by_label("Temperature").fill(temperature)
    window.get_by_label("Max tokens").fill(max_tokens)


def ask(window: Page, text: str) -> None:
    window.get_by_label("Message (Enter").fill(text)
    window.get_by_label("Message (Enter").press("Enter")


def check_answers(browser: Browser, server: Server, complaints: list[str]) -> None:
    window = opened(browser, server, complaints)
    expect(window).to_have_title(MODEL)
    settings(window, "0", "400")
    texts, notes = window.locator("li .text"), window.locator(".note")
    messages: list[dict[str, str]] = []
    window.get_by_label("Message (Enter").press("Shift+Enter")
    expect(window.get_by_label("Message (Enter")).to_have_value("\n")
    for index, question in enumerate(("ab in 12?", "and\n  then?")):
        ask(window, question)
        expect(notes).to_have_count(index + 1)
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400}
        reply = call(server, "POST", CHAT, body).json
        answer = reply["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        assert texts.evaluate_all("all => all.map(one => one.textContent)") == [
            one["content"] for one in messages
        ]
        expect(notes.last).to_contain_text(f"Tokens: {reply['usage']['completion_tokens']} in")
        expect(notes.last).to_contain_text("per second")
    window.get_by_label("Max tokens").fill("0")
    ask(window, "too few")
    expect(window.get_by_role("alert")).to_contain_text("max_tokens")
    expect(window.get_by_label("Message (Enter")).to_have_value("too few")
    expect(texts).to_have_count(4)
    window.get_by_role("button", name="New chat").click()
    expect(texts).to_have_count(0)
    window.close()


def check_stop(browser: Browser, server: Server, complaints: list[str]) -> None:
    """A long answer is stopped, and another one by a new chat; the engine stops work on both."""
    decoder = server.engine.generator.decoder
    run = decoder.run_batch

    def slowly(slots: Sequence[int], count: int | None = None, **others: Any) -> Any:
        time.sleep(0.1)
        return run(slots, count=1, **others)

    for cancelled, button in enumerate(("Stop", "New chat"), 1):
        window = opened(browser, server, complaints)
        settings(window, "0", "")
        with mock.patch.object(decoder, "run_batch", slowly):
            ask(window, "ab the")
            text = window.locator("li .text").last
            expect(text).not_to_be_empty()
            expect(text).not_to_have_text(text.text_content() or "")  # it grows
            window.get_by_role("button", name=button).click()
            expect(window.get_by_role("button", name="Send")).to_be_visible()
        window.wait_for_timeout(500)
        numbers = server.engine.statistics().result()
        assert numbers.under_way == 0 and numbers.ended["cancelled"] == cancelled, numbers.ended
        expect(window.locator("li")).to_have_count(2 if button == "Stop" else 0)
        expect(window.locator(".note")).to_have_text(["Not complete."] if button == "Stop" else [])
        expect(window.get_by_role("alert")).to_be_empty()
        window.get_by_label("Max tokens").fill("5")
        ask(window, "and then?")
        expect(window.locator(".note").last).to_contain_text("in the answer")
        window.close()


def check_key(browser: Browser, server: Server, complaints: list[str], key: str) -> None:
    window = opened(browser, server, complaints)
    field, fault = window.get_by_label("API key"), window.get_by_role("alert")
    expect(fault).to_contain_text("a key is needed")
    expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    expect(fault).to_contain_text("a key is needed")
    expect(field).to_have_value("")
    ask(window, "ab the")
    expect(fault).to_contain_text("a key is needed")
    expect(window.locator("li")).to_have_count(0)
    field.fill(key)
    field.press("Enter")
    expect(window).to_have_title(MODEL)
    expect(fault).to_be_empty()
    expect(field).to_be_hidden()
    expect(window.get_by_label("Message (Enter")).to_have_value("ab the")
    settings(window, "0", "5")
    window.get_by_role("button", name="Send").click()
    expect(window.locator(".note")).to_contain_text("Tokens: 5 in the answer")
    window.reload()
    expect(window).to_have_title(MODEL)
    expect(field).to_be_hidden()
    window.close()


def check_markup(browser: Browser, server: Server, complaints: list[str]) -> None:
    """Markup from the user and the model is shown as it was written."""
    window = opened(browser, server, complaints)
    events = [
        {"choices": [{"delta": {"content": part}, "finish_reason": None}]}
        for part in (MARKUP[:7], MARKUP[7:])
    ]
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    events.append({"choices": [], "usage": {**usage, **details}})  # type: ignore[dict-item]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    window.route(
        f"**{CHAT}", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
    )
    ask(window, MARKUP)
    expect(window.locator(".note")).to_contain_text("Tokens: 2 in the answer")
    shown = window.locator(".text").evaluate_all("all => all.map(one => one.textContent)")
    assert shown == [MARKUP, MARKUP]
    assert window.locator("li .text *").count() == 0
    assert window.evaluate("window.ran") is None
    # The policy is a second defence: markup that were inserted would not run either.
    before = len(complaints)
    window.evaluate("text => { document.querySelector('.text').innerHTML = text; }", MARKUP)
    window.wait_for_timeout(500)
    assert window.evaluate("window.ran") is None
    assert len(complaints) > before and "Content Security Policy" in complaints[-1]
    del complaints[before:]
    window.unroute_all()
    window.route(f"**{CHAT}", lambda route: route.fulfill(body=stream[:40]))
    ask(window, "cut")
    expect(window.get_by_role("alert")).to_have_text("The answer is cut off.")
    window.unroute_all()
    window.route(f"**{CHAT}", lambda route: route.abort())
    ask(window, "lost")
    expect(window.get_by_role("alert")).to_have_text("The connection to the server is lost.")
    window.close()


def take_pictures(
    browser: Browser, server: Server, complaints: list[str], pictures: Path
) -> Iterator[str]:
    for look in LOOKS:
        window = opened(browser, server, complaints, look)
        settings(window, "0", "40")
        for index in range(3):
            ask(window, "ab in 12?\nand a second line " + "that is long " * 12)
            expect(window.locator(".note")).to_have_count(index + 1)
        window.screenshot(path=pictures / f"page-{look}.png")
        whole, width = window.evaluate(_WIDTHS)
        if whole > width:
            yield f"{look}: {whole} pixels wide in a window of {width}"
        if window.evaluate("document.documentElement.scrollHeight > innerHeight"):
            yield f"{look}: higher than the window"
        window.close()


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    pictures, program = Path(sys.argv[1]), browser_program()
    pictures.mkdir(parents=True, exist_ok=True)
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        config = replace(CONFIG, context_length=CONTEXT)
        model = write_gguf(Path(folder, "tiny.gguf"), config=config)
        browser = playwright.chromium.launch(executable_path=program)
        with served(model) as server:
            check_stop(browser, server, complaints)
            check_markup(browser, server, complaints)
            faults = [*take_pictures(browser, server, complaints, pictures)]
            check_answers(browser, server, complaints)
        with served(model, "secönd €") as server:
            check_key(browser, server, complaints, "secönd €")
        browser.close()
    faults += complaints
    print("\n".join(faults) or f"sound: answers, stop, key, markup; pictures in {pictures}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
