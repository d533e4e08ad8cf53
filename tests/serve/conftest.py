"""Fixtures for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import threadpoolctl

from ostinato import open_device
from ostinato.models import TextGenerator
from tests.models.model_files import CONFIG, SPECIAL, TEMPLATE, byte_tokens, write_gguf
from tests.serve import serving
from tests.serve.tool_templates import TEMPLATES

if TYPE_CHECKING:
    from ostinato.serve.server import Server

MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
"""Special tokens, as in Mistral's vocabularies."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Iterator[TextGenerator]:
    with serving.opened(tiny_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def apart(tiny_model: Path) -> Iterator[TextGenerator]:
    """The same model, which no server has."""
    with serving.opened(tiny_model) as opened:
        yield opened


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while serving.clients:
        serving.clients.pop().close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """BLAS's threads spin while they wait: beside other work, two are slower than one."""
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Start]:
    """Starts the server of a model with the template of that name, or with that text, once; with
    `ends`, one whose answers may end, which a grammar needs."""
    folder = tmp_path_factory.mktemp("tools")
    servers: dict[tuple[str | None, bool], Server] = {}
    tokens, _ = byte_tokens()
    tokens[-len(MARKS) :] = MARKS
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - len(MARKS)) + [3] * len(MARKS)
    with ExitStack() as stack:

        def started(name: str | None, ends: bool = False) -> Server:
            if (name, ends) not in servers:
                more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
                if name == "apart":  # as Hermes 3 has it
                    more["tokenizer.chat_template"] = TEMPLATE
                    more["tokenizer.chat_template.tool_use"] = TEMPLATES["hermes"]
                elif name is not None:
                    more["tokenizer.chat_template"] = TEMPLATES.get(name, name)
                path = write_gguf(
                    folder / f"{len(servers)}.gguf",
                    config=replace(CONFIG, context_length=4096),
                    metadata=more,
                )
                device = stack.enter_context(open_device("host"))
                opened = serving.open_generator(device, path, max_context=4096)
                generator = stack.enter_context(opened)
                generator.decoder.set_stop_tokens((2,) if ends else ())
                servers[name, ends] = stack.enter_context(serving.running(generator))
            return servers[name, ends]

        yield started
