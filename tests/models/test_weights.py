"""Weights on their way to a device: converted straight into place, or through ordinary memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.models.files.open import open_checkpoint
from ostinato.models.weights import load_weights
from tests.models.model_files import write_gguf


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("staged", [1, 20_000, 64 << 20])
def test_both_ways_give_the_same_weights(
    host_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type, staged: int
) -> None:
    """One tensor at a time, some at a time, all at once."""
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", kind="Q4_1")) as checkpoint:
        straight = load_weights(host_device, checkpoint, dtype)
        wanted = {name: b.array.copy() for name, b in straight.tensors.items()}
        straight.close()
        apart = replace(host_device.capabilities, host_memory_is_device_memory=False)
        monkeypatch.setattr(Device, "capabilities", apart)
        monkeypatch.setattr("ostinato.models.weights._STAGED_BYTES", staged)
        uploaded = load_weights(host_device, checkpoint, dtype, threads=2)
        assert uploaded.loaded and list(uploaded.tensors) == list(wanted)
        for name, values in wanted.items():
            found = host_device.to_numpy(uploaded.tensors[name])
            assert found.dtype == values.dtype and np.array_equal(found, values), name
        uploaded.close()
