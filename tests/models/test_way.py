"""The way of one token: which files a replayed token goes through, in which order.

docs/design.md walks a reader along it, so what it lists is held to what is seen here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ostinato
from ostinato.device import Device
from ostinato.graph import Graph
from ostinato.models import Decoder
from tests.models.random_models import RandomModel, llama

SOURCE = Path(ostinato.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
MOST = {"decode": 8, "run": 5}


@pytest.fixture
def decoder(host_device: Device) -> Iterator[Decoder]:
    """Tokens of one sequence come from replays."""
    model = RandomModel(llama(2, 1, 32, vocabulary=64, inner=96, layers=2))
    with Decoder(host_device, model.checkpoint(), stop_tokens=()) as opened:
        opened.prefill([1, 2, 3])
        for _ in range(4):
            opened.decode()
        yield opened


def walked(decoder: Decoder, call: Callable[[], object], *, to_the_launch: bool) -> list[str]:
    """The library's files in the order in which `call` enters them, without driver/: the first
    frame there is the launch.  `to_the_launch`: only those before it."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            files[file.relative_to(SOURCE).as_posix()] = None

    before = decoder.statistics()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    after = decoder.statistics()
    assert after.launches_replayed == before.launches_replayed + 1, "one token, one graph launch"
    assert after.launches_eager == before.launches_eager
    names, driver = list(files), [name.startswith("driver/") for name in files]
    if to_the_launch:
        return names[: driver.index(True)]
    return [name for name, inside in zip(names, driver, strict=True) if not inside]


def as_documented(heading: str) -> list[str]:
    """The files that a list of docs/design.md names, in its order."""
    section = re.search(rf"^\*\*{heading}\*\*.*?\n\n(.*?)\n\n", DESIGN.read_text(), re.S | re.M)
    assert section is not None, heading
    return re.findall(r"^\d+\. `([a-z_/]+\.py)`", section[1], re.M)


@pytest.mark.parametrize("another", [False, True])
def test_a_decoded_token(decoder: Decoder, host_device: Device, another: bool) -> None:
    """`another`: another graph of the cache was used since the last token."""
    if another:
        graph = Graph.create(host_device)
        graph.add_empty()
        decoder.graph_cache.install("another", graph.instantiate())
        assert decoder.graph_cache.get("another") is not None
    files = walked(decoder, decoder.decode, to_the_launch=True)
    assert len(files) <= MOST["decode"]
    if another:
        files.remove("step/cache.py")  # makes the step's the most recently used
    assert files == as_documented("`Decoder.decode`, to the launch")


def test_a_token_of_a_run(decoder: Decoder) -> None:
    with decoder.run() as tokens:
        for _ in range(4):
            next(tokens)
        files = walked(decoder, lambda: next(tokens), to_the_launch=False)
    assert len(files) <= MOST["run"]
    assert files == as_documented("`Decoder.run`, one token from end to end")
