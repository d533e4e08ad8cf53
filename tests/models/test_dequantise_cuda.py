"""Tensors converted by the CUDA kernels, which the emulator runs and, where there is one, a GPU:
the bits of the conversion on the host."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.driver.signature import to_bfloat16
from ostinato.models.cuda.dequantise import (
    convert_on_device,
    dequantise_on_device,
    staged_bytes,
)
from ostinato.models.files.checkpoint import RawTensor
from ostinato.models.files.dequantise import BLOCK_TYPES, SUPPORTED_TYPES, dequantise_rows
from ostinato.models.files.open import open_checkpoint
from ostinato.models.weights import load_weights
from tests.conftest import open_test_device
from tests.models.emulated import EmulatedModules
from tests.models.model_files import permute, weights, write_folder, write_gguf


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, host_device: Device) -> Iterator[Device]:
    """A device that converts: the host with the emulator's kernels, or a GPU."""
    if request.param == "cuda":
        with open_test_device("cuda", request.config) as opened:
            yield opened
        return
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    as_gpu = replace(
        host_device.capabilities, host_memory_is_device_memory=False, source_language="cuda"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_device, "modules", EmulatedModules(host_device))
        patch.setattr(Device, "capabilities", as_gpu)
        yield host_device


def bits(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Rows of any bits: scales that are zero, subnormal, infinite and no number among them."""
    random = np.random.default_rng(3)
    return random.integers(0, 256, (rows, BLOCK_TYPES[kind].size * blocks), dtype=np.uint8)


def on_host(kind: str, stored: np.ndarray, dtype: type) -> np.ndarray:
    block = BLOCK_TYPES[kind]
    values = np.empty((len(stored), stored.shape[1] // block.size * block.values), np.float32)
    dequantise_rows(kind, stored, values)
    return values if dtype is np.float32 else to_bfloat16(values)


def converted(
    device: Device, kind: str, stored: np.ndarray, columns: int, dtype: type, heads: int = 0
) -> np.ndarray:
    shape = (len(stored), columns)
    raw = RawTensor("t", kind, shape, Path("none"), 0, stored.nbytes, heads)
    stored.flags.writeable = False  # as a mapped file's are
    with (
        device.create_stream() as stream,
        device.empty(staged_bytes([raw]), "bytes") as staging,
        device.zeros(shape, dtype) as out,
    ):
        dequantise_on_device(device.modules, raw, stored.reshape(-1), out, staging, stream)
        return out.to_numpy(stream)


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same bits, but for which NaN it is."""
    if found.dtype == np.uint16:
        found, wanted = ((a.astype(np.uint32) << 16).view(np.float32) for a in (found, wanted))
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_any_bits_become_what_the_host_makes_of_them(
    device: Device, kind: str, dtype: type
) -> None:
    stored = bits(kind, 7, 3 if BLOCK_TYPES[kind].values > 1 else 301)
    wanted = on_host(kind, stored, dtype)
    assert_same(converted(device, kind, stored, wanted.shape[1], dtype), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_every_half_precision_number(device: Device, dtype: type) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(64, -1)
    wanted = on_host("F16", stored, dtype)
    assert_same(converted(device, "F16", stored, 1024, dtype), wanted)


def test_rounding_to_bfloat16_at_every_edge(device: Device) -> None:
    """Ties both ways, a carry into the exponent, overflow, and what is no number."""
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    stored = np.concatenate([halves | low for low in (0x7FFF, 0x8000, 0x8001)])
    rows = stored.view(np.uint8).reshape(192, -1)
    with np.errstate(invalid="ignore"):
        wanted = on_host("F32", rows, np.uint16)
    assert_same(converted(device, "F32", rows, 1024, np.uint16), wanted)


@pytest.mark.sanitize
@pytest.mark.parametrize("staged", [1, 400, 1 << 20])
@pytest.mark.parametrize(("kind", "heads"), [("Q4_0", 3), ("F16", 1), ("Q8_0", 0)])
def test_rows_of_heads_come_back_in_half_split_order(
    device: Device, monkeypatch: pytest.MonkeyPatch, staged: int, kind: str, heads: int
) -> None:
    """In one piece, in some, and a head or a row at a time."""
    monkeypatch.setattr("ostinato.models.cuda.dequantise._MOST_STAGED", staged)
    wanted = bits(kind, 24, 2 if kind != "F16" else 37)
    stored = permute(wanted, heads) if heads else wanted.copy()
    found = on_host(kind, wanted, np.float32)
    assert_same(converted(device, kind, stored, found.shape[1], np.float32, heads), found)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("kind", ["F32", "Q4_1", "a folder of F16"])
def test_all_weights_of_a_file(device: Device, tmp_path: Path, kind: str, dtype: Any) -> None:
    """Fused matrices and vectors in their places; nothing converted by the host."""
    values = weights()
    if kind.startswith("a folder"):
        path = write_folder(tmp_path / "m", values, dtype=np.float16, shards=2)
    else:
        path = write_gguf(tmp_path / "m.gguf", values, kind=kind)
    with open_checkpoint(path) as checkpoint:
        wanted = {name: checkpoint.tensor(name) for name in values}
        checkpoint.load = None  # type: ignore[assignment, method-assign]
        loaded = load_weights(device, checkpoint, dtype, convert=partial(convert_on_device, device))
    assert loaded.loaded
    for layer in ("layers.0", "layers.1"):
        qkv = [wanted.pop(f"{layer}.{name}") for name in ("wq", "wk", "wv")]
        gate_up = [wanted.pop(f"{layer}.{name}") for name in ("w_gate", "w_up")]
        wanted[f"{layer}.wqkv"] = np.concatenate(qkv)
        wanted[f"{layer}.w_gate_up"] = np.concatenate(gate_up)
    assert set(loaded.tensors) == set(wanted)
    with device.create_stream() as stream:
        for name, value in wanted.items():
            matrix = value.ndim == 2 and dtype is np.uint16
            found = loaded.tensors[name].to_numpy(stream)
            assert found.dtype == (np.uint16 if matrix else np.float32)
            assert np.array_equal(found, to_bfloat16(value) if matrix else value), name
    loaded.close()


@pytest.mark.alone
def test_what_is_damaged_leaves_nothing_behind(device: Device, tmp_path: Path) -> None:
    """A checkpoint closed under way is refused, and the memory given back."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", kind="Q8_0"))
    checkpoint.close()
    free = device.memory_info()[0]
    with pytest.raises(Exception, match="closed; open it again"):
        load_weights(device, checkpoint, np.uint16, convert=partial(convert_on_device, device))
    device.synchronize()
    assert device.memory_info()[0] >= free - (2 << 20)
