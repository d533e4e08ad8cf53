"""The real model against transformers, on the same file: tools/make_reference.py made the data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from ostinato.device import open_device
from ostinato.models.decoder import Decoder
from ostinato.models.host import packed_kernels as kernels_packed
from tests.models.proof import answer, check_ways

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "reference_smollm2.json").read_text(encoding="utf-8")
)
PROMPTS = {prompt["name"]: prompt for prompt in REFERENCE["prompts"]}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """OpenBLAS's threads wait for each other by spinning: where other work shares the cores, two
    are up to ten times slower than one."""
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield


BOTH = pytest.mark.parametrize("decoder", ["packed", "numpy"], indirect=True)


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Decoder]:
    """One for all tests, by the compiled kernels and, as where they were not built, by NumPy (0.6
    GB).  What a test opens besides is of the same kind."""
    if request.param == "packed" and not kernels_packed.compiled():
        pytest.skip("the extension was not built here")
    chosen = kernels_packed.without_extension() if request.param == "numpy" else nullcontext()
    with (
        chosen,
        open_device("host") as device,
        Decoder(device, smollm2_path, max_context=512, sequences=2, stop_tokens=()) as opened,
    ):
        assert opened.backend.packed == (request.param == "packed")
        yield opened


def relative_error(logits: np.ndarray, step: dict[str, Any]) -> float:
    """The largest difference to the digest, relative to its largest logit."""
    ours = np.concatenate([logits[step["top_ids"]], logits[REFERENCE["sample_indices"]]])
    theirs = np.array(step["top_values"] + step["sampled"])
    largest = np.abs(ours - theirs).max() / np.abs(theirs).max()
    norm = np.linalg.norm(logits.astype(np.float64))
    return float(max(largest, abs(norm - step["norm"]) / step["norm"]))


@pytest.mark.parametrize("count", [12, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        pytest.param(kind, name, marks=() if quick else pytest.mark.slow)
        for kind in ("packed", "numpy")
        for name in PROMPTS
        for quick in [(kind, name) in (("packed", "question"), ("packed", "code"))]
    ],
    indirect=["decoder"],
)
def test_greedy_tokens_and_their_logits_equal_transformers(
    decoder: Decoder, name: str, count: int
) -> None:
    prompt = PROMPTS[name]
    decoder.reset()
    tokens = [decoder.prefill(prompt["prompt_ids"])]
    errors = [relative_error(decoder.logits(), prompt["steps"][0])]
    for step in prompt["steps"][1:count]:
        tokens.append(decoder.decode())
        errors.append(relative_error(decoder.logits(), step))
    assert tokens == prompt["tokens"][:count] and len(tokens) == count
    assert max(errors) < 1e-3, f"the bound asked for; measured: {max(errors):.1e}"
    assert max(errors) < 2e-5, "float32 should do far better than what was asked for"


@pytest.mark.slow
@BOTH
def test_replay_equals_eager_and_recorded_bit_for_bit(decoder: Decoder, smollm2_path: Path) -> None:
    opened = partial(Decoder, decoder.device, smollm2_path, max_context=128, stop_tokens=())
    prompt = PROMPTS["chat_question"]["prompt_ids"]
    check_ways(opened, lambda other: answer(other, prompt, 7), {}, {"build": "record"})
    assert decoder.statistics().launches_per_token == 153


@pytest.mark.slow
@BOTH
def test_two_sequences_in_a_batch_equal_each_alone(decoder: Decoder) -> None:
    names = ("question", "code")
    decoder.reset()
    first = [decoder.prefill(PROMPTS[name]["prompt_ids"], i) for i, name in enumerate(names)]
    steps = [first, *(decoder.decode_batch((0, 1)) for _ in range(15))]
    for column, name in zip(zip(*steps, strict=True), names, strict=True):
        assert list(column) == PROMPTS[name]["tokens"][:16]
