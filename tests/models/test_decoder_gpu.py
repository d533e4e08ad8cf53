"""The decoder where only a GPU shows it: how its graph is made, that memory is given back, and the
real model in bfloat16.

What it computes is in test_decoder_proof.py and test_decoder_run.py, on both drivers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.driver.api import EdgeType
from ostinato.errors import DownloadError
from ostinato.graph import record
from ostinato.models.backend import BoundLaunch, DeviceModel
from ostinato.models.decoder import Decoder
from ostinato.models.files.open import open_checkpoint
from tests.models.proof import FIRST, RELATIVE, SHAPES, open_decoder
from tests.models.random_models import RandomModel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("build", ["capture", "record"])
def test_the_graph_is_a_programmatic_chain(gpu: Device, build: str) -> None:
    with open_decoder(gpu, SHAPES[FIRST], graphs=False) as decoder:
        decoder.prefill(RandomModel(SHAPES[FIRST]).tokens(75))
        for _ in range(2):  # the rows stay as they are from here on
            decoder.decode()
        if build == "capture":
            graph = decoder.graph()
        else:
            with record(decoder.stream) as recording:
                decoder.decode()
            graph = recording.build()
        context = decoder.plan.sizes.context
        bound = decoder.backend.bind(decoder.program(), DeviceModel(decoder.config, context), 1)
        launches = [one for one in bound if isinstance(one, BoundLaunch)]
        assert [node.name for node in graph.nodes()] == [one.kernel.name for one in launches]
        place = {node.handle: index for index, node in enumerate(graph.nodes())}
        edges = sorted((place[edge.source], place[edge.target]) for edge in graph.edges())
        assert edges == [(i, i + 1) for i in range(len(place) - 1)]
        early = {place[e.target] for e in graph.edges() if e.data.type is EdgeType.PROGRAMMATIC}
        assert early == {i for i, one in enumerate(launches) if one.config.programmatic}
        # All but the first, and the second where it reads what `embed` wrote before it waits.
        assert len(early) >= len(launches) - 2
        graph.close()


@pytest.mark.alone
def test_everything_is_given_back(gpu: Device) -> None:
    for _ in range(2):  # the driver keeps some of its own after the first
        gpu.synchronize()
        free, _ = gpu.memory_info()
        with open_decoder(gpu, SHAPES[FIRST]) as decoder:
            decoder.prefill(RandomModel(SHAPES[FIRST]).tokens(75))
            decoder.decode()
            decoder.decode()
        gpu.synchronize()
    assert free - gpu.memory_info()[0] < 8 << 20


# ----------------------------------------------------------------------------------- the real model


REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "reference_smollm2.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def smollm2_file(request: pytest.FixtureRequest) -> Path:
    """OSTINATO_MODEL_FILE, or fetched; skipped where it can neither be had nor fetched."""
    given = os.environ.get("OSTINATO_MODEL_FILE")
    if given:
        return Path(given)
    try:
        path: Path = request.getfixturevalue("smollm2_path")
    except DownloadError as error:
        pytest.skip(f"no model file (OSTINATO_MODEL_FILE names one): {error}")
    return path


@pytest.fixture(scope="module", params=["bf16", "packed"])
def smollm2(gpu: Device, smollm2_file: Path, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with (
        open_checkpoint(smollm2_file) as checkpoint,
        Decoder(gpu, checkpoint, max_context=512, stop_tokens=(), weights=request.param) as decoder,
    ):
        yield decoder


@pytest.mark.parametrize("prompt", REFERENCE["prompts"], ids=lambda p: p["name"])
def test_64_greedy_tokens_of_smollm2(smollm2: Decoder, prompt: dict[str, Any]) -> None:
    """Equal to float32's wherever its two best logits lie further apart than the error of both.

    The error is measured: the largest difference of any logit in the reference's digests (its
    best ones and 16 more) over the 64 steps; it must itself stay within the bound for logits.
    After a token that differs the reference's own is put in its place.
    """
    steps, wanted = prompt["steps"], prompt["tokens"]
    smollm2.reset()
    token = smollm2.prefill(prompt["prompt_ids"])
    errors, differing = [], []
    for index, (step, right) in enumerate(zip(steps, wanted, strict=True)):
        logits = smollm2.logits()
        theirs = np.array(step["top_values"] + step["sampled"])
        ids = step["top_ids"] + REFERENCE["sample_indices"]
        errors.append(float(np.abs(logits[ids] - theirs).max()))
        assert errors[-1] < RELATIVE["cuda"] * np.abs(theirs).max(), f"token {index}"
        assert token == int(logits.argmax())
        if token != right:
            differing.append((index, step["top_values"][0] - step["top_values"][1]))
        if index + 1 < len(wanted):
            token = smollm2.decode() if token == right else smollm2.prefill([right])
    bound = 2 * max(errors)
    too_far = [(index, margin) for index, margin in differing if margin > bound]
    assert not too_far, f"at (token, margin) {too_far}; the bound is {bound:.3f}"
    margins = [step["top_values"][0] - step["top_values"][1] for step in steps]
    assert sum(margin > bound for margin in margins) >= 32, f"{bound:.3f} bounds nothing"
