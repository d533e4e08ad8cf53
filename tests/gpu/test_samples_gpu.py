"""The samples of the docs that need torch, and what stands before them in their pages."""

from __future__ import annotations

import pytest

from tests.gpu.foreign import library
from tools import samples

torch = library("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("page", samples.PAGES_FOR_GPUS)
def test_samples_run_on_a_gpu(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And print what they print on the host driver."""
    monkeypatch.setenv("OSTINATO_DEVICE", "cuda:0")
    text = (samples.ROOT / page).read_text(encoding="utf-8")
    blocks = samples.samples(text)
    for block, printed in zip(blocks, samples.run(page, blocks), strict=True):
        if block.output is not None:
            start, stop = block.output
            assert printed == text[start:stop]
