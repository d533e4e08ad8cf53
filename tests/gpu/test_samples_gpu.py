"""The samples of the docs that need a GPU, and what stands before them in their pages."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.foreign import mend_numba
from tools import samples

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("page", samples.PAGES_FOR_GPUS)
@pytest.mark.usefixtures("cuda_device")
def test_samples_run_on_a_gpu(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And print what they print on the host driver."""
    monkeypatch.setenv("OSTINATO_DEVICE", "cuda:0")
    mend_numba()
    text = (samples.ROOT / page).read_text(encoding="utf-8")
    found = samples.samples(text)
    libraries = {block.library for block in found} - {""}
    lacking = {name for name in libraries if importlib.util.find_spec(name) is None}
    blocks = [block for block in found if block.library not in lacking]
    for block, printed in zip(blocks, samples.run(page, blocks), strict=True):
        if block.output is not None:
            start, stop = block.output
            assert printed == text[start:stop]
    if lacking:
        pytest.skip(f"all ran but the samples with {', '.join(sorted(lacking))}")
