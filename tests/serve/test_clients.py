"""Client libraries at the server, as their users use them: OpenAI's own is in the other files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

# Where this is missing there are tests of other things; `make test` installs it
# (tests/test_packaging.py).
pytest.importorskip("ostinato.serve.server")

from tests.models.model_files import SPECIAL
from tests.serve.serving import MODEL, SECONDS, Start, say

CALL = '<tool_call>\n{"name": "warmth", "arguments": {"place": "Köln"}}\n</tool_call>'


# ---------------------------------------------------------------------------------------- LangChain


def warmth(place: str) -> str:
    """Says how warm it is."""
    return f"21 °C in {place}"


@pytest.fixture
def langchain(start: Start) -> Any:
    """Makes LangChain's model of a server."""
    module = pytest.importorskip("langchain_openai")

    def made(name: str | None = "hermes", ends: bool = False, **options: Any) -> Any:
        url = start(name, ends=ends).url
        place = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        return module.ChatOpenAI(model=MODEL, **place, **options)

    return made


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_chats(
    start: Start, langchain: Any, responses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, start("hermes"), "It is 21 °C.")
    model = langchain(use_responses_api=responses, temperature=0.5, max_tokens=40)
    messages = [("system", "Be brief."), ("human", "How warm is it?"), ("ai", "Where?")]
    answer = model.invoke([*messages, ("human", "In Köln.")])
    assert answer.text == "It is 21 °C."
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream("How warm is it?"))
    assert "".join(piece.text for piece in pieces) == "It is 21 °C." and len(pieces) > 1


def test_langchain_calls_tools(
    start: Start, langchain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, start("hermes"), f"Let me see.\n{CALL}", "It is 21 °C.")
    model = langchain().bind_tools([warmth])
    answer = model.invoke("How warm is it in Köln?")
    (one,) = answer.tool_calls
    assert (one["name"], one["args"]) == ("warmth", {"place": "Köln"})
    assert answer.content == "Let me see."
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    result = {"role": "tool", "content": warmth(**one["args"]), "tool_call_id": one["id"]}
    assert model.invoke([("human", "How warm?"), answer, result]).content == "It is 21 °C."
    whole = sum(list(model.stream("How warm is it in Köln?"))[1:], next(model.stream("?")))
    assert [each["args"] for each in whole.tool_calls] == [{"place": "Köln"}]


def test_langchain_says_what_is_not_supported(langchain: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="tools cannot be used"):
        langchain(None).bind_tools([warmth]).invoke("How warm is it?")


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_makes_a_model_answer_in_its_form(langchain: Any, responses: bool) -> None:
    """By a call, forced or strict, and by a schema; the model has random weights."""
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")

    class Found(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        """What was found."""

        size: Literal[1, 2]

    bias = {str(len(SPECIAL) + byte): -100 for byte in b"\n\t\r"}
    same = {"extra_body": {"seed": 1, "logit_bias": bias}}
    model = langchain(ends=True, use_responses_api=responses, max_tokens=900, **same)
    for options in (
        {"method": "function_calling"},
        {"method": "function_calling", "strict": True},
        {"method": "json_schema"},
        {"method": "json_schema", "strict": True, "tools": [warmth]},
    ):
        found = model.with_structured_output(Found, include_raw=True, **options).invoke("How?")
        if "tools" not in options or not found["raw"].tool_calls:
            assert found["parsed"].size in (1, 2), found
    called = model.bind_tools([Found], tool_choice="any", parallel_tool_calls=False)
    (one,) = called.invoke("How?").tool_calls
    assert one["name"] == "Found" and one["args"]["size"] in (1, 2)
    pieces = list(called.stream("How?"))
    (one,) = sum(pieces[1:], pieces[0]).tool_calls
    assert one["name"] == "Found" and one["args"]["size"] in (1, 2)


# -------------------------------------------------------------------------------- the command llm


@pytest.fixture
def llm(start: Start, tmp_path: Path) -> Any:
    """Runs the command `llm` with a server as its only model of its own."""
    pytest.importorskip("llm")

    def run(*arguments: str) -> str:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {start('hermes').url}/v1\n"
            "  supports_tools: true\n"
        )
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments, "-m", "ours"],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            encoding="utf-8", timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("more", [(), ("--no-stream", "-s", "Be brief.", "-o", "seed", "5")])
def test_llm_chats(
    start: Start, llm: Any, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, start("hermes"), "It is 21 °C.")
    assert llm("How warm is it?", *more) == "It is 21 °C.\n"


def test_llm_calls_tools(start: Start, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, start("hermes"), CALL, "It is 21 °C.")
    source = "def warmth(place: str) -> str:\n    'How warm it is.'\n    return '21 in ' + place"
    said = llm("How warm is it?", "--functions", source, "--td")
    assert "21 in Köln" in said and "It is 21 °C." in said
